"""The division of a batch's rows among the replicas, and its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from distnb.runtime.this_process import this_process

__all__ = ["DivideRows", "GatherRows", "Rows", "WholeLoss"]


@dataclass(frozen=True)
class Rows:
    """The division of a batch's rows among the replicas.

    Attributes:
        whole: The number of rows.
        parts: The start and end of each replica's rows, as even as possible, the first ones larger.
        rank: This replica.
    """

    whole: int
    parts: Sequence[tuple[int, int]]
    rank: int

    @classmethod
    def of(cls, whole: int) -> Rows:
        """Divide the rows of a batch among the replicas."""
        process = this_process.replica
        assert process is not None
        each, more = divmod(whole, process.size)
        begins = [rank * each + min(rank, more) for rank in range(process.size + 1)]
        return cls(whole, list(itertools.pairwise(begins)), process.rank)

    @property
    def own(self) -> int:
        """The number of this replica's rows."""
        begin, end = self.parts[self.rank]
        return end - begin

    @property
    def counting(self) -> int:
        """The number of replicas that have rows."""
        return min(self.whole, len(self.parts))

    @property
    def computed(self) -> slice:
        """The rows that this replica computes. Layers need not support an empty batch: one row is computed, and then
        dropped.
        """
        begin, end = self.parts[self.rank]
        return slice(begin, end) if self.own else slice(0, 1)

    def gathered(self, computed: torch.Tensor) -> torch.Tensor:
        """Return the rows of all replicas, which may differ in number."""
        process = this_process.replica
        assert process is not None
        most = max(end - begin for begin, end in self.parts)
        padded = computed.detach()[: self.own]
        if self.own < most:
            padded = torch.cat([padded, padded.new_zeros((most - self.own, *computed.shape[1:]))])
        pieces = process.group.all_gather(padded.contiguous())
        return torch.cat([piece[: end - begin] for piece, (begin, end) in zip(pieces, self.parts, strict=True)])


class Division(Protocol):
    """A step that divides tensors among the replicas."""

    def divide(self, rows: Rows, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows that this replica computes."""


class GatherRows(torch.autograd.Function):
    """The rows of all replicas, from each replica's. Each replica's rows get their part of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, shared: Division, rows: Rows, own: torch.Tensor) -> torch.Tensor:
        ctx.shared, ctx.rows = shared, rows
        return rows.gathered(own)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        own = ctx.shared.divide(ctx.rows, upstream)
        return None, None, own if ctx.rows.own else own * 0


class DivideRows(torch.autograd.Function):
    """The rows of a batch that this replica computes. Every replica gets the whole gradient of the batch."""

    @staticmethod
    def forward(ctx: Any, shared: Division, rows: Rows, whole: torch.Tensor) -> torch.Tensor:
        ctx.shared, ctx.rows = shared, rows
        return whole[rows.computed].clone()  # layers may overwrite their input

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return None, None, GatherRows.apply(ctx.shared, ctx.rows, upstream)  # type: ignore[no-untyped-call]


class WholeLoss(torch.autograd.Function):
    """A loss of the whole batch, which all replicas have, in place of the loss of this replica's rows."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, whole: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return upstream * ctx.share, None, None
