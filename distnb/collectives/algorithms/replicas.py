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
    """The communication of a method of `CrossDeviceOps` with the replicas. distnb creates it.

    *Every* replica calls each method, in the same order and with a tensor of the same shape and dtype, even if it sends
    or receives nothing. The calls are recorded and compared like all collectives: if they differ, every replica raises
    `CollectiveMismatchError`; if one replica raises or dies, the others do not wait for it.

    Attributes:
        rank: This replica's id.
        size: The number of replicas.
        devices: The replicas' devices, such as "cuda:0", in replica order.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.devices = tuple(map(str, group.devices))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> torch.Tensor:
        """Return the sum or mean of all replicas' tensors, computed by NCCL, Gloo or in shared memory.

        Args:
            tensor: This replica's tensor; it is not modified.
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
            tensor: The tensor to send; on the other replicas, the tensor to overwrite.
            source: The id of the replica that sends.
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
        """Send messages from replica to replica in one step. All replicas call it, even if they send nothing.

        Args:
            tensor: The tensor that this replica sends, if it sends one.
            pairs: (source, target) of each message, the same on all replicas. A replica sends at most one message and
                receives at most one.

        Returns:
            The tensor that this replica received, or None.

        Raises:
            OptionError: A replica of the pairs does not exist, or is the source or target of two.
        """
        return self._group.exchange(tensor, pairs)


def _word(op: ReduceOp | str) -> str:
    return ReduceOp.parse(op).value.lower()


def require_like(total: object, like: torch.Tensor, what: str, expected: str) -> None:
    """Raise an error unless the result of a user's function is a dense tensor of the expected shape and dtype.

    Args:
        what: The function and its argument, for the error.
        expected: The expected result up to "the same shape and dtype", for the error.
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
