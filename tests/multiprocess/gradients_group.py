"""The least process group that gradient sync can work with: plain Gloo, no guard."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class PlainGroup:
    """What `distnb.collectives.groups.Group` offers to gradient sync, without its guard."""

    generation = 0
    aborted = False

    def __init__(self) -> None:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.calls: list[tuple[str, int]] = []
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=30)
        )

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self.calls.append(("all_reduce", tensor.numel()))
        dist.all_reduce(tensor)

    def all_reduce_start(self, tensor: torch.Tensor, op: str = "sum") -> Any:
        self.calls.append(("all_reduce_start", tensor.numel()))
        return dist.all_reduce(tensor, async_op=True)

    def all_gather_uneven(self, tensor: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        self.calls.append(("all_gather_uneven", tensor.numel()))
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, tensor)
        return found

    def all_gather_object(self, value: object) -> list[Any]:
        self.calls.append(("all_gather_object", 0))
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found
