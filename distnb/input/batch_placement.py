"""Batches on their way to the replica's device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from distnb.accelerators import torch_device
from distnb.input.cutting import map_parts
from distnb.topology import Device

__all__ = ["BatchPlacement", "placement_for"]


class BatchPlacement(ABC):
    """Brings the leaves of batches to a device."""

    @abstractmethod
    def carry(self, leaf: Any, borrowed: bool) -> Any:
        """The leaf on the device.

        Args:
            leaf: A tensor, array, list of one item per example, or an object with a `to` method.
            borrowed: The leaf is a view of the user's data, so the result must be a copy.
        """

    def batch(self, make: Callable[[], Any], ahead: bool) -> Any:
        """Make one batch, whose leaves are carried.

        Args:
            make: Makes it, on the thread that reads.
            ahead: The batch is made before it is asked for.

        Returns:
            What `hand_over` takes.
        """
        return make()

    def hand_over(self, made: Any) -> Any:
        """The batch itself, ready for work that the calling thread starts now."""
        return made


def placement_for(device: Device) -> BatchPlacement:
    """How batches reach a device."""
    if device.type == "cpu":
        return _Host()
    return _Cuda(torch.device("cuda", device.index)) if device.type == "cuda" else _Elsewhere(device)


class _Host(BatchPlacement):
    def carry(self, leaf: Any, borrowed: bool) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type != "cpu":
                return leaf.cpu()
            return leaf.clone() if borrowed else leaf
        return leaf


class _Elsewhere(BatchPlacement):
    """Devices without streams and pinned memory."""

    def __init__(self, device: Device) -> None:
        self._device = torch_device(device)

    def carry(self, leaf: Any, borrowed: bool) -> Any:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._device, copy=borrowed)

        return _deep(leaf, move, self._device)


class _Cuda(BatchPlacement):
    """Copies from pinned memory that the host does not wait for; for batches made ahead, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._carried: list[torch.Tensor] | None = None

    def carry(self, leaf: Any, borrowed: bool) -> Any:
        return _deep(leaf, self._move_copy if borrowed else self._move, self._device)

    def _move_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._keep(tensor.clone()) if tensor.device == self._device else self._move(tensor)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return self._keep(tensor.to(self._device, non_blocking=True))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._carried is not None:
            self._carried.append(tensor)
        return tensor

    def batch(self, make: Callable[[], Any], ahead: bool) -> Any:
        if not ahead:
            return make(), None, ()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._carried = []
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
                tensor.record_stream(current)  # its memory may not be used anew before this stream is past it
        return batch


def _deep(leaf: Any, move: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    """Move the tensors of a leaf: of a list of one item per example, those within the items."""

    def part(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return move(node)
        return node.to(device) if hasattr(node, "to") else node

    return part(leaf) if isinstance(leaf, torch.Tensor) else map_parts(leaf, part)
