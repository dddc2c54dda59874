"""The communication of an algorithm with the other replicas, and the check of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from distnb.errors import OptionError
from distnb.options import ReduceOp

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["Replicas", "require_like"]


class Replicas:
    """The replicas, as a method of `CrossDeviceOps` sees them. Programs do not make one.

    Each method is one step that *every* replica takes, in the same order, with a tensor of the same shape and dtype,
    also those that it sends nothing to. Steps are recorded and compared, like every collective: if the replicas take
    different ones, all of them raise `CollectiveMismatchError`; if one raises or dies, the others do not wait for it.

    Attributes:
        rank: This replica's id.
        size: How many replicas there are.
        devices: Every replica's device, such as "cuda:0", in replica order.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.devices = tuple(map(str, group.devices))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> torch.Tensor:
        """Return the sum or mean of all replicas' tensors, by NCCL or Gloo (or in memory that the replicas share).

        Args:
            tensor: Left as it is.
            op: SUM or MEAN.
        """
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._group.all_reduce(total, _word(op))
        return total

    def reduce(self, tensor: torch.Tensor, to: int = 0, op: ReduceOp | str = ReduceOp.SUM) -> torch.Tensor | None:
        """Return the sum or mean on replica `to`, and None on the others."""
        return self._group.reduce(tensor, to, _word(op))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the tensor of replica `source`, on all replicas.

        Args:
            tensor: On the others its values do not matter, and are overwritten.
            source: Whose tensor it is.
        """
        self._group.broadcast(tensor, source)
        return tensor

    def gather(self, tensor: torch.Tensor, to: int = 0) -> list[torch.Tensor] | None:
        """Return all replicas' tensors, in replica order, on replica `to`, and None on the others."""
        return self._group.gather(tensor, to)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return all replicas' tensors, in replica order, on all replicas."""
        return self._group.all_gather(tensor)

    def exchange(self, tensor: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        """Send messages from replica to replica, in one step, which all replicas take, also if they send nothing.

        Args:
            tensor: What this replica sends, if it does.
            pairs: (source, target) of each message, the same on all replicas. A replica sends to one other at most,
                and gets from one at most.

        Returns:
            What this replica got, or None.

        Raises:
            OptionError: Pairs that are impossible.
        """
        return self._group.exchange(tensor, pairs)


def _word(op: ReduceOp | str) -> str:
    return ReduceOp.parse(op).value.lower()


def require_like(total: object, like: torch.Tensor, what: str, expected: str) -> None:
    """Refuse the result of a user's function, unless it is a dense tensor of the shape and dtype of another.

    Args:
        what: Which function it is and what it was given, for the error.
        expected: What it must return, "in the same shape and dtype" apart, for the error.
    """
    got = repr(total)
    if isinstance(total, torch.Tensor):
        dense = total.layout == torch.strided
        if dense and not total.is_meta and (total.shape, total.dtype) == (like.shape, like.dtype):
            return
        layout = "" if dense else f" {str(total.layout).removeprefix('torch.')}"
        got = f"{total.dtype}{list(total.shape)}{layout}{' without data' if total.is_meta else ''}"
    raise OptionError(
        f"{what} and returned {got}. It must return {expected} the same shape and dtype, dense and with data."
    )
