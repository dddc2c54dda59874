"""The process group that torch and its users see. Its operations are recorded, compared, and can be aborted.

It represents Gloo's or NCCL's own group, which belongs to its communicator, and outlives that group. After an abort it
gets a new communicator for the next generation, so that a DistributedDataParallel module or a subgroup that was made in
an earlier cell stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import constants

from distnb import activity
from distnb.activity import Arrival
from distnb.collectives.eager import methods_always_eager
from distnb.collectives.group.backends import Backends
from distnb.collectives.group.communicator import Beginning, Communicator
from distnb.collectives.group.work import DeviceWork, HostWork, Message, Staging, positive_seconds
from distnb.collectives.shared_memory.shared_sum import SHARDS, SharedSum, SharedWork, Write
from distnb.collectives.verify import callsite, signature
from distnb.collectives.verify.collective_log import CollectiveRecord
from distnb.collectives.verify.program_calls import ProgramCalls
from distnb.collectives.verify.signature import Key, of_tensors
from distnb.compat.c10d_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceScatterOptions,
)
from distnb.errors import CollectiveError, OptionError

if TYPE_CHECKING:
    from distnb.collectives.group.membership import Membership

__all__ = ["OWN", "GuardedProcessGroup"]

OWN = "distnb's "
"""The prefix of the names of distnb's own operations. A program's time limits apply to torch's operations only."""

_NOT_CONNECTED = (
    "This process group belongs to another team of replicas than the running program, or to a generation that ended."
)
# Any for the type checker: torch's stubs have overloads that only the old interface used.
_ProcessGroup: Any = dist.ProcessGroup
Work = dist.Work
_T = TypeVar("_T")
_ONE, _BOTH = (True,), (True, False)


def _collective(
    word: str, method: str, written: tuple[bool, ...], default: Callable[[], Any] | None = None, compared: int = -1
) -> Callable[..., Work]:
    """Return a method of torch's ProcessGroup that takes tensors, or lists of them, and options.

    Args:
        word: The operation's name in errors.
        method: The backend's method.
        written: Whether the operation writes to each of the tensor arguments.
        default: Returns the options if none are given.
        compared: The index of the tensor argument whose shape is equal on all replicas.
    """

    def call(self: GuardedProcessGroup, *args: Any) -> Work:
        tensors, given = args[: len(written)], args[len(written) :]
        opts = (given[0] if given else None) or (default() if default is not None else None)
        alike = tensors[compared]
        if isinstance(alike, Tensor):
            alike = [alike]
        elif isinstance(alike[0], list):
            alike = alike[0]
        key = of_tensors(word, _op(opts), getattr(opts, "rootRank", None), alike)
        return self.run(key, method, tensors, written, opts)

    return call


def _reduce_scatter(word: str, method: str) -> Callable[..., Work]:
    """Return a reduce-scatter of torch's ProcessGroup, whose arguments are two tensors, or two lists of equal length.

    Over Gloo it is an all-reduce of a copy, as in torch. torch wraps that in a work that ignores the time limit of its
    `wait`, never reports its completion, and has no future, so that the main thread could wait in C++ for ever.
    """

    def call(self: GuardedProcessGroup, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or ReduceScatterOptions()
        several = not isinstance(inputs, Tensor)
        alike = inputs if several else [inputs]
        key = of_tensors(word, _op(opts), None, alike[0] if isinstance(alike[0], list) else alike)
        if self._carried_as(key[3]) != "cpu":
            return self.run(key, method, (outputs, inputs), _BOTH, opts)
        outputs = outputs if several else [outputs]
        staging = Staging(outputs[0].device)
        flat = staging.scatter(outputs, [_parts(each, self.size()) for each in alike], self.rank())
        options = AllreduceOptions()
        options.reduceOp = opts.reduceOp
        return self.run(key, "allreduce", ([flat],), _ONE, options, staging=staging)

    return call


def _parts(whole: Tensor | list[Tensor], size: int) -> Sequence[Tensor]:
    """Cut one input of a reduce-scatter into the ranks' parts. Raise ValueError if they are not equal."""
    if isinstance(whole, list):
        return whole
    if whole.numel() % size:
        raise ValueError(
            f"reduce_scatter got an input of shape {list(whole.shape)} for {size} replicas. Its size must "
            f"be divisible by {size}."
        )
    return whole.detach().reshape(size, -1).unbind()


@methods_always_eager
class GuardedProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose operations are recorded, compared and can be aborted.

    The operations have the names and arguments of torch's ProcessGroup; where torch renamed one, both names are here.
    C++ is not given its backends, because it could bypass the guard.

    Args:
        membership: This process in the team.
        label: The group's name in the team, the same on every replica.
        replicas: The replica id of each rank.
        parent: The group that this one is a part of.

    Attributes:
        communicator: The communicator of this generation.
        calls: The counts of this replica's program.
    """

    # C++ keeps these in its backends, and has none here.
    group_name = ""
    group_desc = "undefined"

    def __init__(
        self, membership: Membership, label: str, replicas: Sequence[int], parent: GuardedProcessGroup | None = None
    ) -> None:
        super().__init__(replicas.index(membership.rank), len(replicas))
        self.membership = membership
        self.label = label
        self.replicas = tuple(replicas)
        self.parent = parent
        self.program: int = parent.program if parent is not None else 0
        self.calls: ProgramCalls = parent.calls if parent is not None else ProgramCalls()
        self.communicator = Communicator(self)
        self._destroyed = False
        self._time_limit_s: float | None = None
        self._patience_s: float | None = None
        self._in_memory = True

    # -- torch's queries -----------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.membership.device_types]

    def _get_backend(self, device: torch.device) -> Any:
        kind = self._carried_as(device.type)
        return self.ready()[1].backends[kind]

    def _carried_as(self, kind: str) -> str:
        """Return the device type whose backend carries tensors of another type: some go through host memory."""
        if kind not in self.membership.device_types:
            raise RuntimeError(
                f"No backend type associated with device type {kind}: these replicas communicate tensors on "
                f"{', '.join(self.membership.device_types)}."
            )
        return "cpu" if kind in self.membership.staged else kind

    def _get_backend_name(self) -> str:
        return self.membership.backend_name

    name = _get_backend_name

    def getBackendName(self) -> str:
        """Return the backend's name for C++. It is not one of torch's, for which C++ would assume one of its own
        classes."""
        return "distnb"

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text

    def getGroupName(self) -> str:
        """Return the name, for C++."""
        return self.group_name

    def getGroupDesc(self) -> str:
        """Return the description, for C++."""
        return self.group_desc

    def _get_sequence_number_for_group(self) -> int:
        verifier = self.communicator.verifier
        return verifier.number if verifier is not None else 0

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the verifier numbers operations."""

    def _start_coalescing(self, device: torch.device) -> None:
        self._get_backend(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._get_backend(device)._end_coalescing()

    # -- life --------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta | None) -> None:
        """Set the time limit of torch's operations; exceeding it ends the communicator. None and torch's default mean
        none."""
        self._time_limit_s = _limit(timeout)

    def prefer(self, patience_s: float | None, in_memory: bool) -> tuple[float | None, bool]:
        """Set the preferences of the current strategy, equally on all replicas. Return the previous ones.

        A collective that takes longer than `patience_s` ends the communicator. `in_memory` allows shared memory in
        place of sockets.
        """
        before = self._patience_s, self._in_memory
        self._patience_s, self._in_memory = patience_s, in_memory
        return before

    def reset(self) -> None:
        """Release the connections. Every operation raises an error until `renew`. Never blocks."""
        self.communicator.retire()
        self.communicator = Communicator(self, CollectiveError(_NOT_CONNECTED))

    def renew(self) -> None:
        """Allow the next operation to connect again, for a new generation, unless the group was destroyed."""
        if not self._destroyed:
            self.communicator = Communicator(self)

    def abort(self) -> None:
        """End everything under way on this replica. torch calls this."""
        self.communicator.stop(CollectiveError("The process group was aborted."))

    def shutdown(self) -> None:
        """End a group that is no longer used, while other replicas may still be in their last operation. torch calls
        this."""
        self._destroyed = True
        self.communicator.retire(CollectiveError("The process group was destroyed. Make a new one."), abort=False)

    def ready(self) -> tuple[Communicator, Backends]:
        """Return the connected communicator and its backends. Raise the failure if there is one."""
        current = self.communicator
        if current.backends is None or current.failure is not None:
            current.connect()
        backends = current.backends
        if backends is None:
            current.raise_failure()
        return current, backends

    # -- programs ----------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """Begin a program on this replica."""
        self.program = program
        if self.parent is None:
            self.calls.begin_program()
        self.communicator.begin_program(program)

    # -- how operations begin ----------------------------------------------------------------------------------------

    def _enter(
        self, record: CollectiveRecord, limit_s: float | None, begin: Callable[[Communicator, Backends, Arrival], _T]
    ) -> tuple[Communicator, int, _T]:
        """Post a collective and begin it. Return its communicator, its number, and the result of `begin`."""
        current, backends = self.ready()
        at = activity.clock()
        with current.posting:
            number = current.post(record, limit_s)
            arrival = Arrival(at=at, group=current.name, number=number, what=record.operation, where=record.place)
            made = begin(current, backends, arrival)
        activity.collective_started(arrival)
        return current, number, made

    def run(
        self,
        key: Key,
        method: str,
        tensors: tuple[Any, ...],
        written: tuple[bool, ...],
        *rest: Any,
        timeout: timedelta | None = None,
        staging: Staging | None = None,
    ) -> Work:
        """Record a collective by its key, and enter it by the backend's method.

        Args:
            tensors: Its arguments that are tensors or lists of them.
            written: Whether it writes to each of them.
            rest: The other arguments.
            timeout: The caller's own time limit.
            staging: The memory of `tensors`, if they represent those of the caller.
        """
        device = self._carried_as(key[3])
        record = signature.record(key)
        if device != key[3] and staging is None:
            staging = Staging(_device_of(tensors))
            tensors = tuple(staging.host(each, written=flag) for each, flag in zip(tensors, written, strict=True))
        limit_s = self._patience_s
        if not key[0].startswith(OWN):
            limits = (limit_s, self._time_limit_s, positive_seconds(timeout))
            limit_s = min((each for each in limits if each is not None), default=None)

        begun: Arrival

        def begin(current: Communicator, backends: Backends, arrival: Arrival) -> Any:
            nonlocal begun
            begun, number, backend = arrival, arrival.number, backends.backends[device]
            if device == "cpu":
                current.open[number] = Beginning()
            try:
                return (getattr(backend, method, None) or getattr(backends.plain, method))(*tensors, *rest)
            except BaseException as error:
                current.retract(number, error)
                raise

        current, number, inner = self._enter(record, limit_s, begin)
        current.limit(number, inner, limit_s)
        if device != "cpu":
            return cast(Work, inner and DeviceWork(current, inner))  # none while operations are coalesced
        current.open[number] = inner
        return HostWork(current, inner, begun, staging)

    def shared_memory(self, kind: str) -> SharedSum | None:
        """Return the memory that the replicas share for tensors of a device type, or None (on all replicas)."""
        return self.ready()[0].shared if self._in_memory and self._carried_as(kind) == "cpu" else None

    def start_in_memory(
        self,
        key: Key,
        tensor: Tensor,
        op: str,
        sources: Sequence[int] | None = None,
        wanted: bool = True,
        write: Write | None = None,
    ) -> SharedWork | None:
        """Begin a reduction, or a gather of tensors, in memory that the replicas share.

        Args:
            tensor: The tensor to reduce in place, or to gather. Its size is the same on all replicas.
            op: "sum", "mean", "max", "min" or "gather".
            sources: The replicas whose tensors this one gathers; None means all.
            wanted: Whether any replica gathers this one's tensor.
            write: Writes what is reduced to the shared memory; None copies the tensor.

        Returns:
            The work, or None (on all replicas) if such a tensor or this group needs a backend.
        """
        shared = self.shared_memory(key[3])
        if shared is None or not shared.accepts(tensor, op):
            return None

        def begin(current: Communicator, backends: Backends, arrival: Arrival) -> SharedWork:
            assert current.shared is not None  # replicas that share memory do so in each communicator
            own = current.shared.post(tensor, current, arrival.number, wanted, write)
            return SharedWork(current.shared, own, tensor, op, current, arrival, sources)

        return self._enter_in_memory(key, begin)

    def start_sharded(self, key: Key, shard: Tensor, whole: Tensor, op: str) -> SharedWork | None:
        """Begin a reduce-scatter of whole tensors, or a gather of shards, in memory that the replicas share.

        Args:
            shard: The tensor for this replica's part of the result, or this replica's shard.
            whole: This replica's tensor to reduce, or the tensor for the shards of all.
            op: "sum", "mean", "max" or "min" for a reduce-scatter, "shards" for a gather.

        Returns:
            The work, or None (on all replicas) if such a tensor or this group needs a backend.
        """
        shared = self.shared_memory(key[3])
        if shared is None or not shared.accepts_sharded(whole.numel(), whole.dtype, op):
            return None

        def begin(current: Communicator, backends: Backends, arrival: Arrival) -> SharedWork:
            assert current.shared is not None
            if op == SHARDS:
                own = current.shared.post_shard(shard, whole, current, arrival.number)
                return SharedWork(current.shared, own, whole, op, current, arrival)
            own = current.shared.post(whole, current, arrival.number)
            return SharedWork(current.shared, own, shard, op, current, arrival, scatters=True)

        return self._enter_in_memory(key, begin)

    def _enter_in_memory(self, key: Key, begin: Callable[[Communicator, Backends, Arrival], SharedWork]) -> SharedWork:
        current, number, work = self._enter(signature.record(key), self._patience_s, begin)
        current.limit(number, work, self._patience_s)
        return work

    def note(self, key: Key) -> int:
        """Record an action that all replicas must take alike although it does not communicate. Return its number."""
        return self._enter(signature.record(key), None, lambda current, backends, arrival: None)[1]

    def meet(self, key: Key, content: str) -> list[str] | None:
        """Wait until all replicas have called this after a call of `run`; see `Communicator.meet`."""
        current, _ = self.ready()
        return current.meet(replace(signature.record(key), content=content))

    # -- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Work:
        if isinstance(tensors, Tensor):  # torch's short form
            tensors = [tensors]
        if not isinstance(opts, AllreduceOptions):  # its old interface takes a bare reduce op, or nothing
            given, opts = opts, AllreduceOptions()
            if given is not None:
                opts.reduceOp = given
        return self.run(of_tensors("all_reduce", _op(opts), None, tensors), "allreduce", (tensors,), (True,), opts)

    allreduce_coalesced = _collective("all_reduce_coalesced", "allreduce_coalesced", _ONE)
    broadcast = _collective("broadcast", "broadcast", _ONE)
    reduce = _collective("reduce", "reduce", _ONE)
    allgather = _collective("all_gather", "allgather", _BOTH, AllgatherOptions)
    all_gather_single = _collective("all_gather_into_tensor", "_allgather_base", _BOTH, AllgatherOptions)
    allgather_coalesced = _collective("all_gather_coalesced", "allgather_coalesced", _BOTH, AllgatherOptions)
    all_gather_single_coalesced = _collective(
        "all_gather_into_tensor", "allgather_into_tensor_coalesced", _BOTH, AllgatherOptions
    )
    gather = _collective("gather", "gather", _BOTH)
    scatter = _collective("scatter", "scatter", _BOTH, compared=0)
    reduce_scatter = _reduce_scatter("reduce_scatter", "reduce_scatter")
    reduce_scatter_single = _reduce_scatter("reduce_scatter_tensor", "_reduce_scatter_base")
    reduce_scatter_single_coalesced = _reduce_scatter("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")

    # -- all to all --------------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> Work:
        if output_splits or input_splits:
            # Splits may differ between replicas, so they are exchanged and compared before any data flows.
            self._compare_splits(output, input, output_splits, input_splits)
            key = ("all_to_all_single", None, None, input.device.type, ("splits", *input.shape[1:]), input.dtype)
        else:
            key = of_tensors("all_to_all_single", None, None, [input])
        return self.run(key, "alltoall_base", (output, input), _BOTH, output_splits, input_splits, opts)

    def _compare_splits(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        size = self.size()
        sent = torch.tensor(input_splits or [input.shape[0] // size] * size, dtype=torch.int64)
        expected = torch.tensor(output_splits or [output.shape[0] // size] * size, dtype=torch.int64)
        coming = torch.empty_like(sent)
        key = of_tensors("all_to_all_single", None, None, [sent])
        self.run(key, "alltoall_base", (coming, sent), _BOTH, [], [], AllToAllOptions()).wait()
        if not torch.equal(coming, expected):
            # A replica that expects other sizes raises an error. The others notice that it does not enter.
            raise ValueError(
                f"all_to_all_single: this replica expects {expected.tolist()} rows from the ranks, but they send "
                f"{coming.tolist()}. output_split_sizes[j] must be what rank j has as input_split_sizes for this rank."
            )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        key = ("all_to_all", None, None, inputs[0].device.type, "…", inputs[0].dtype)
        return self.run(key, "alltoall", (outputs, inputs), _BOTH, opts)

    # -- barriers ----------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        given = opts or BarrierOptions()
        # A time limit of Gloo's own would break the connections when it expires.
        inner = BarrierOptions()
        inner.device_ids, inner.device = given.device_ids, given.device
        kind = given.device.type if given.device is not None else "cpu"
        if kind not in self.membership.device_types:
            kind = "cpu"
        key = ("barrier", None, None, self._carried_as(kind))
        return self.run(key, "barrier", (), (), inner, timeout=given.timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait at a barrier with a time limit. The error names all replicas that did not arrive."""
        limit_s = _limit(timeout)
        limit = timedelta(seconds=limit_s) if limit_s is not None else None
        self.run(("monitored_barrier", None, None, "cpu"), "barrier", (), (), BarrierOptions(), timeout=limit).wait()

    # -- messages between two replicas -------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        return self._message("send", tensors, False, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        return self._message("recv", tensors, True, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._message("recv_anysource", tensors, True, tag)

    def _message(self, method: str, tensors: list[Tensor], written: bool, *rest: Any) -> Work:
        """Start a send or a receive. These have no number: only two replicas take part."""
        current, backends = self.ready()
        device, staging = tensors[0].device, None
        kind = self._carried_as(device.type)
        if kind != device.type:
            staging = Staging(device)
            tensors = staging.host(tensors, written=written)
        inner = getattr(backends.backends[kind], method)(tensors, *rest)
        if kind != "cpu":
            return DeviceWork(current, inner)
        what = f"{method}({', '.join(map(str, rest))})"
        arrival = Arrival(at=activity.clock(), what=what, where=callsite.current().place)
        return HostWork(current, Message(inner), arrival, staging, self._time_limit_s)

    # -- subgroups ---------------------------------------------------------------------------------------------------

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> GuardedProcessGroup | None:
        """Return a part of this group, which connects at its first use; None on replicas outside it.

        The part has the backends of the whole group, one for each device type, regardless of the backend that is asked
        for (torch passes it since 2.14).
        """
        name = str(group_name)
        if name.isdigit():
            # A name from torch's counter: every replica makes its groups in the same order. The counters themselves may
            # differ since an earlier failure, so the group gets its number in the log.
            name = str(self.note(("new_group", None, None, "cpu", tuple(ranks), "ranks")))
        made = self.membership.make_subgroup(self, list(ranks), name)
        if made is not None:
            made.set_timeout(timeout)
            made._set_group_name(group_name)
            made._set_group_desc(group_desc or "undefined")
        return made

    # torch's older names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _op(opts: Any) -> int | None:
    op = getattr(opts, "reduceOp", None)
    return hash(op) if op is not None else None  # its number, five times faster than asking for it


def _device_of(value: Any) -> torch.device:
    while not isinstance(value, Tensor):
        value = next(each for each in value if not isinstance(each, (list, tuple)) or each)
    return value.device


def _limit(timeout: timedelta | None) -> float | None:
    """Return a time limit in seconds, or None. torch's default of half an hour, which it always passes, means None."""
    if timeout is None or timeout in (constants.default_pg_timeout, constants.default_pg_nccl_timeout):
        return None
    if timeout.total_seconds() <= 0:
        raise OptionError(f"timeout={timeout!r}: a time limit for collectives must be positive.")
    return timeout.total_seconds()
