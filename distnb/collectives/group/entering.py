"""How a process group's operations begin: recorded and compared first, then entered in the backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from distnb.collectives.group.process_group import GroupCore
from distnb.collectives.group.staging import Staging
from distnb.collectives.group.work import Beginning, CollectiveWork, DeviceWork, MessageWork, positive_seconds
from distnb.collectives.shared_memory.shared_sum import SharedWork
from distnb.collectives.verify import signature
from distnb.collectives.verify.collective_log import Record
from distnb.collectives.verify.verifier import Superseded, Verifier
from distnb.errors import CollectiveError, ProgramAborted

__all__ = ["OWN", "Entering"]

_PAUSE_S = 0.002
_ORDERS_TO_END = (KeyboardInterrupt, ProgramAborted)
OWN = "group."
"""How the operations of distnb itself are called. A time limit that a program gives holds for torch's."""


class Entering(GroupCore):
    """A process group that can begin operations; `operations.GuardedProcessGroup` names them all."""

    def start_in_memory(
        self,
        key: signature.Key,
        tensor: torch.Tensor,
        op: str,
        sources: Sequence[int] | None = None,
        wanted: bool = True,
    ) -> SharedWork | None:
        """Begin a reduction, or the copying of tensors, in memory that the replicas share.

        Args:
            key: Its signature.
            tensor: What is reduced, in place, or gathered. As large on all replicas.
            op: "sum", "mean", "max", "min" or "gather".
            sources: Of a gather: whose tensors this replica gets; None for all.
            wanted: Of a gather: whether any replica gets this one's.

        Returns:
            The work; None if this tensor, or this group, cannot be served so. That is so on all replicas then.
        """
        transport = self._ready()
        shared, ledger = self._shared, self._ledger
        kind = tensor.device.type
        if (
            shared is None
            or ledger is None
            or not self.in_memory
            or not (kind == "cpu" or kind in transport.staged)
            or not shared.takes(tensor, op)
        ):
            return None
        record = signature.record(key)
        try:
            with self._issuing:
                number = self._post(ledger, record)
                own = shared.post(tensor, self, number, wanted)
        except Superseded as found:
            self.supersede(found)
            return self.start_in_memory(key, tensor, op, sources, wanted)
        return SharedWork(shared, own, tensor, op, self, number, sources)

    def note(self, key: signature.Key) -> int:
        """Record something that every replica must do alike, though nothing is communicated in it."""
        self._ready()
        record = signature.record(key)
        ledger = self._ledger
        if ledger is None:
            self.raise_failure()
        try:
            with self._issuing:
                return self._post(ledger, record)
        except Superseded as found:
            self.supersede(found)
            return self.note(key)

    def _run(
        self,
        key: signature.Key,
        method: str,
        tensors: tuple[Any, ...],
        written: tuple[bool, ...],
        *rest: Any,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Record a collective and enter it.

        Args:
            key: Its signature.
            method: The backend's name for it.
            tensors: Its arguments that are tensors or lists of them; `written` tells which it writes to.
            rest: The other arguments.
            timeout: The caller's own time limit.
        """
        while True:
            try:
                return self._enter(key, method, tensors, written, *rest, timeout=timeout)
            except Superseded as found:
                self.supersede(found)

    def _enter(
        self,
        key: signature.Key,
        method: str,
        tensors: tuple[Any, ...],
        written: tuple[bool, ...],
        *rest: Any,
        timeout: timedelta | None,
    ) -> dist.Work:
        transport = self._ready()
        device = key[3]
        record = signature.record(key)
        staging = None
        if device in transport.staged:
            staging = Staging(_device_of(tensors))
            tensors = tuple(staging.host(each, written=flag) for each, flag in zip(tensors, written, strict=True))
            device = "cpu"
        backend = transport.backends.get(device)
        if backend is None:
            raise RuntimeError(
                f"No backend type associated with device type {device}: these replicas communicate tensors on "
                f"{', '.join(transport.backends)}."
            )
        call = getattr(backend, method, None) or getattr(transport.plain, method)
        ledger = self._ledger
        if ledger is None:
            self.raise_failure()
        with self._issuing:
            number = self._post(ledger, record)
            if device == "cpu":
                self._open[number] = Beginning()
            try:
                inner = call(*tensors, *rest)
            except BaseException as error:
                if not isinstance(error, _ORDERS_TO_END):
                    self._open.pop(number, None)
                ledger.retract(number, error)
                raise
        limit_s = positive_seconds(timeout)
        if not key[0].startswith(OWN):
            # A caller that waits in Gloo is freed alone; one that waits in NCCL only by an abort.
            self._time_limit.watch(number, inner, limit_s if device != "cpu" else None)
        elif device != "cpu" and self._patience_s is not None:
            self._time_limit.watch(number, inner, self._patience_s)
        if device != "cpu":
            return cast(dist.Work, inner and DeviceWork(self, inner))  # none while operations are coalesced
        self._open[number] = inner
        return CollectiveWork(self, inner, number, staging, limit_s)

    def _post(self, ledger: Verifier, record: Record) -> int:
        """Number a collective that is about to be entered, and compare it with what others called."""
        epoch, waits = self.epoch, self._waits
        if waits is not None:
            waits.issued()
        while not ledger.room():
            time.sleep(_PAUSE_S)
            self.examine(epoch, None)
        # After an error nothing is entered before all are known to be there: others may wait somewhere else.
        careful = self._standing.excused | ledger.is_new(record) | (ledger.breaks > 0 and ledger.number == 0)
        try:
            number = ledger.post(record)
        except CollectiveError as error:
            self.fail(error, mendable=True, told=True)
            raise
        if careful:
            while not ledger.agreed(number):
                self.examine(epoch, number)
                time.sleep(_PAUSE_S)
            ledger.entered()
        return number

    def _message(self, method: str, tensors: list[torch.Tensor], written: bool, *rest: Any) -> dist.Work:
        """Start a send or a receive. These have no number: only two replicas take part."""
        transport = self._ready()
        device = tensors[0].device
        if device.type != "cpu" and device.type not in transport.staged:
            return DeviceWork(self, getattr(transport.backends[device.type], method)(tensors, *rest))
        staging = None
        if device.type in transport.staged:
            staging = Staging(device)
            tensors = staging.host(tensors, written=written)
        inner = getattr(transport.backends["cpu"], method)(tensors, *rest)
        return MessageWork(self, inner, staging, self._time_limit.seconds)


def _device_of(value: Any) -> torch.device:
    while not isinstance(value, torch.Tensor):
        value = next(each for each in value if not isinstance(each, (list, tuple)) or each)
    return value.device
