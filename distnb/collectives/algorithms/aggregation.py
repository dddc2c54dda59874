"""One strategy's way to bring tensors together, on one group of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from distnb.collectives.algorithms.base import CrossDeviceOps
from distnb.collectives.algorithms.nccl import NcclAllReduce
from distnb.collectives.algorithms.packs import Packs
from distnb.collectives.algorithms.replicas import Replicas
from distnb.collectives.algorithms.results import confirm_equal, unfit
from distnb.collectives.group.process_group import OWN
from distnb.errors import OptionError
from distnb.options import CommunicationImplementation, CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from distnb.collectives.gradients.buckets import Started
    from distnb.collectives.group.interface import Group

__all__ = ["Aggregation"]


_FIRST_RESULTS = 3
# Of an algorithm of the user's so many results are compared with the other replicas': one that forgets to communicate
# would let the replicas drift apart without a word.

_BACKENDS = {
    CommunicationImplementation.AUTO: "",
    CommunicationImplementation.RING: "gloo",
    CommunicationImplementation.NCCL: "nccl",
}


class Aggregation:
    """Sums and means over the replicas, by the algorithm that a strategy was given.

    Args:
        group: The replicas.
        ops: The algorithm; None for the group's own.
        packs: How tensors that are reduced together are packed.
        options: What one call was told instead of what the strategy was; None for the strategy's own ways.

    Attributes:
        group, packs: As given.
        exact: Whether the group itself adds up, so that distnb's own marks may ride with the data.
    """

    def __init__(
        self,
        group: Group,
        ops: CrossDeviceOps | None = None,
        packs: Packs | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        self.group = group
        self.packs = packs or Packs()
        self.exact = ops is None or type(ops).reduce_implementation is NcclAllReduce.reduce_implementation
        self._ops = None if self.exact else ops
        self._replicas = Replicas(group)
        self._options = options
        own = self._ops is not None and not type(self._ops).__module__.startswith("distnb.")
        self._unconfirmed = _FIRST_RESULTS if own else 0

    def told(self, options: CommunicationOptions) -> Aggregation:
        """The same replicas, communicating as one call says. Every replica must say the same.

        Raises:
            OptionError: They cannot communicate so.
            CollectiveMismatchError: Another replica says otherwise.
        """
        wanted, found = _BACKENDS[options.implementation], self.group.process_group.name()
        if wanted and (self._ops is not None or found != wanted):
            way = f"their tensors go the way of {self._ops!r}" if self._ops is not None else f"{found} connects them"
            raise OptionError(
                f"implementation={options.implementation.name!r} cannot be honoured by these replicas: {way}. Leave it "
                "out."
            )
        made = Aggregation(self.group, self._ops, Packs.larger_than(options.bytes_per_pack), options)
        with made.communicating():
            self.group.process_group.note((f"{OWN}options", None, repr(options), "cpu"))
        return made

    def communicating(self) -> AbstractContextManager[None]:
        """A context for collectives that go as the call was told."""
        options = self._options
        if options is None:
            return nullcontext()
        ring = options.implementation is CommunicationImplementation.RING
        return _preferring(self.group, options.timeout_seconds, not ring)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Replace the tensor (contiguous, of real numbers) by the sum or mean over all replicas."""
        with self.communicating():
            self._all_reduce(tensor, op)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if self._ops is None or not tensor.numel():
            self.group.all_reduce(tensor, op.value.lower())
            return
        with torch.no_grad():
            given = tensor.detach()
            total = self._ops.reduce_implementation(op, given, self._replicas)
            if total is not given:
                if (got := unfit(total, given.shape, given.dtype)) is not None:
                    raise OptionError(
                        f"{type(self._ops).__name__}.reduce_implementation was given {given.dtype}{list(given.shape)} "
                        f"and returned {got}. It must return a tensor of the same shape and dtype, dense and with data."
                    )
                tensor.copy_(total)
            if self._unconfirmed:
                self._unconfirmed -= 1
                confirm_equal(self.group, self._ops, tensor)

    def all_reduce_start(self, tensor: torch.Tensor) -> Started:
        """Begin to sum in place; an algorithm of the strategy's own has done so when this returns."""
        if self._ops is None:
            return self.group.all_reduce_start(tensor)
        self.all_reduce(tensor)
        return _DONE


@contextmanager
def _preferring(group: Group, patience_s: float | None, in_memory: bool) -> Iterator[None]:
    before = group.process_group.prefer(patience_s, in_memory)
    try:
        yield
    finally:
        group.process_group.prefer(*before)


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


_DONE = _Done()
