"""The aggregation of tensors by one strategy, on one group of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from distnb.collectives.algorithms.checked_results import require_like
from distnb.collectives.algorithms.flat_packs import Packs
from distnb.collectives.digests import digest
from distnb.collectives.group.interface import PendingCollective
from distnb.collectives.group.process_group import OWN
from distnb.errors import OptionError
from distnb.options import CommunicationImplementation, CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from distnb.collectives.algorithms.base import CrossDeviceOps
    from distnb.collectives.group.interface import Group
    from distnb.collectives.shared_memory.shared_sum import SharedWork, Write

__all__ = ["Aggregation"]

_FIRST_RESULTS = 3
# The number of results of a user's algorithm that are compared over the replicas: one that forgets to communicate would
# let the replicas drift apart silently.

_BACKENDS = {
    CommunicationImplementation.AUTO: "",
    CommunicationImplementation.RING: "gloo",
    CommunicationImplementation.NCCL: "nccl",
}


class Aggregation:
    """Sums and means over the replicas, by the strategy's algorithm or, by default, the group's own.

    `options` are the options of one call; they replace the strategy's. If `is_groups_own`, the group itself computes
    the sums, and may do so while a backward pass is running.
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
        self.is_groups_own = ops is None or ops.is_groups_own
        self._ops = None if self.is_groups_own else ops
        self._options = options
        own = self._ops is not None and not type(self._ops).__module__.startswith("distnb.")
        self._unconfirmed = _FIRST_RESULTS if own else 0

    def with_options(self, options: CommunicationOptions) -> Aggregation:
        """Return the same aggregation with the options of one call, which must be equal on all replicas.

        Raises:
            OptionError: These replicas cannot communicate as the options say.
            CollectiveMismatchError: Another replica passed other options.
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

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Return a context for collectives that communicate as the options say."""
        options = self._options
        if options is None:
            yield
            return
        process_group = self.group.process_group
        in_memory = options.implementation is not CommunicationImplementation.RING
        before = process_group.prefer(options.timeout_seconds, in_memory)
        try:
            yield
        finally:
            process_group.prefer(*before)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Replace the tensor (contiguous, of real numbers) by the sum or mean over all replicas."""
        if self._options is None and self._ops is None:
            self.group.all_reduce(tensor, op)
            return
        with self.communicating(), torch.no_grad():
            if self._ops is None or not tensor.numel():
                self.group.all_reduce(tensor, op)
                return
            given = tensor.detach()
            total = self._ops.reduce_implementation(op, given, self.group)
            if total is not given:
                what = f"{type(self._ops).__name__}.reduce_implementation was given {given.dtype}{list(given.shape)}"
                require_like(total, given, what, "a tensor of")
                tensor.copy_(total)
            if self._unconfirmed:
                self._unconfirmed -= 1
                self._confirm_equal(self._ops, tensor)

    def _confirm_equal(self, ops: CrossDeviceOps, total: torch.Tensor) -> None:
        """Compare a result with the other replicas', bit by bit."""
        self.group.note(f"{type(ops).__name__}.reduce.finished", (total,))  # which replicas that are still in it notice
        digests = self.group.all_gather(torch.tensor([digest(total)], device=total.device))
        unlike = [rank for rank, each in enumerate(digests) if not torch.equal(each, digests[0])]
        if unlike:
            raise OptionError(
                f"{type(ops).__name__}.reduce_implementation returned another result on replica "
                f"{', '.join(map(str, unlike))} than on replica 0. It must return the same bits on all of them, as "
                "`replicas.all_reduce(tensor, op)` does, or `replicas.broadcast(total)` at its end."
            )

    def all_reduce_start(self, tensor: torch.Tensor, write: Write) -> PendingCollective | SharedWork:
        """Start an `all_reduce` of what `write` writes to the memory that it is given (see `Group.all_reduce_start`).

        With an algorithm of the strategy's own it is complete when this returns.
        """
        if self._ops is None:
            return self.group.all_reduce_start(tensor, write=write)
        write(tensor)
        self.all_reduce(tensor)
        return PendingCollective(None, tensor, 1)
