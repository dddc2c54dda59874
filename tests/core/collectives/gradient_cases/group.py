"""The process group of the gradient tests: the real one, with a record of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distnb.collectives.group.memberships import memberships


class NotedGroup:
    """`distnb.collectives.group.memberships.Group` with a list of its calls and a settable generation."""

    def __init__(self) -> None:
        self.inner = memberships.join_from_env()
        self.device, self.devices, self.process_group = self.inner.device, self.inner.devices, self.inner.process_group
        self.rank, self.size, self.generation = self.inner.rank, self.inner.size, self.inner.generation
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self.calls.append(("all_reduce", tensor.numel()))
        self.inner.all_reduce(tensor, op)

    def all_reduce_start(self, tensor: torch.Tensor, **options: Any) -> Any:
        self.calls.append(("all_reduce_start", tensor.numel()))
        return self.inner.all_reduce_start(tensor, **options)

    def all_gather_uneven(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append(("all_gather_uneven", tensor.numel()))
        return self.inner.all_gather_uneven(tensor)

    def all_gather_object(self, value: object) -> list[Any]:
        self.calls.append(("all_gather_object", 0))
        return self.inner.all_gather_object(value)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self.calls.append(("broadcast", tensor.numel()))
        self.inner.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append(("all_gather", tensor.numel()))
        return self.inner.all_gather(tensor)

    def note_pack(self, tensors: Sequence[torch.Tensor], layout: object) -> None:
        self.inner.note_pack(tensors, layout)
