"""Movement of batches to the replica's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distnb.accelerators import torch_device
from distnb.input.cutting import map_parts
from distnb.topology import Device

__all__ = ["BatchPlacement", "placement_for"]


class BatchPlacement:
    """Mover of the leaves of batches to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def carry(self, leaf: Any, borrowed: bool) -> Any:
        """Return the leaf on the device: a tensor, a list with tensors, or an object with a `to` method.

        With `borrowed` the leaf is a view of the user's data, so the result must be a copy.
        """

        def part(node: Any) -> Any:
            if isinstance(node, torch.Tensor):
                return self._move(node, borrowed)
            return node.to(self._device) if hasattr(node, "to") else node

        if isinstance(leaf, torch.Tensor):
            return self._move(leaf, borrowed)
        return leaf if self._device.type == "cpu" else map_parts(leaf, part)

    def _move(self, tensor: torch.Tensor, borrowed: bool) -> torch.Tensor:
        return tensor.to(self._device, copy=borrowed)

    def batch(self, make: Callable[[], Any], ahead: bool) -> Any:
        """Call `make`, which moves the leaves of a batch, and return its result for `hand_over`.

        Args:
            make: The function.
            ahead: True if the batch has not been requested yet.
        """
        return make()

    def hand_over(self, made: Any) -> Any:
        """Return the batch itself, ready for work that the calling thread starts now."""
        return made


def placement_for(device: Device) -> BatchPlacement:
    """Return the object that moves batches to a device."""
    return (_Cuda if device.type == "cuda" else BatchPlacement)(torch_device(device))


class _Cuda(BatchPlacement):
    """Asynchronous copies from pinned memory. Batches made ahead use their own stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: torch.cuda.Stream | None = None
        self._carried: list[torch.Tensor] = []

    def _move(self, tensor: torch.Tensor, borrowed: bool) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() and not tensor.is_pinned():
            tensor = tensor.pin_memory()
            borrowed = False
        moved = tensor.to(self._device, non_blocking=True, copy=borrowed)
        self._carried.append(moved)
        return moved

    def batch(self, make: Callable[[], Any], ahead: bool) -> Any:
        self._carried = []
        if not ahead:
            return make(), None, ()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            made = make()
            done = torch.cuda.Event()
            done.record(self._stream)
        return made, done, self._carried

    def hand_over(self, made: Any) -> Any:
        batch, done, carried = made
        if done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            for tensor in carried:
                tensor.record_stream(current)  # the memory must not be reused before this stream has passed here
        return batch
