"""Tensors of a device on their way through host memory, where replicas share one GPU and only Gloo can carry them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Staging"]


class Staging:
    """Host copies of the tensors of one operation.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.devices = [device]
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._result: list[torch.Tensor] = []
        self._done = False

    def host(self, value: Any, *, written: bool) -> Any:
        """A host copy of a tensor, or of each tensor in nested lists.

        Args:
            value: Tensor or (nested) list of tensors.
            written: The operation writes to it, so that it is copied back.
        """
        if isinstance(value, torch.Tensor):
            copy = value.detach().to("cpu", copy=True)
            if written:
                self._pairs.append((value, copy))
            return copy
        return [self.host(each, written=written) for each in value]

    def copy_back(self) -> Sequence[torch.Tensor]:
        """Bring what the operation wrote to the device. Idempotent.

        Returns:
            The tensors that were written.
        """
        if not self._done:
            self._done = True
            with torch.no_grad():
                for original, copy in self._pairs:
                    original.copy_(copy)
            self._result = [original for original, _ in self._pairs]
            self._pairs = []
        return self._result
