"""Every operation that torch calls on a process group, from Python and from C++, each of them guarded.

The methods have the names and arguments of torch's ProcessGroup; where torch renamed one, both names are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BarrierOptions

from distnb.collectives.group.eager import methods_always_eager
from distnb.collectives.group.entering import Entering
from distnb.collectives.group.time_limit import TimeLimit
from distnb.collectives.verify.signature import Key, of_tensors

__all__ = ["GuardedProcessGroup"]

Work = dist.Work
_BOTH = (True, False)


def _op(opts: Any) -> int:
    return hash(opts.reduceOp)  # the op's number, five times faster than asking for it


def _reduce_options(opts: Any) -> Any:
    """torch's old interface takes a bare reduce op, or nothing."""
    made = AllreduceOptions()
    if opts is not None:
        made.reduceOp = opts
    return made


@methods_always_eager
class GuardedProcessGroup(Entering):
    """A process group whose operations are recorded, compared and can be aborted.

    Args: see `process_group.GroupCore`.
    """

    # -- reductions and broadcasts ---------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Work:
        if isinstance(tensors, Tensor):  # torch's short form
            tensors = [tensors]
        if not isinstance(opts, AllreduceOptions):
            opts = _reduce_options(opts)
        return self._run(of_tensors("all_reduce", _op(opts), None, tensors), "allreduce", (tensors,), (True,), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._run(
            of_tensors("all_reduce_coalesced", _op(opts), None, tensors),
            "allreduce_coalesced",
            (tensors,),
            (True,),
            opts,
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._run(of_tensors("broadcast", None, opts.rootRank, tensors), "broadcast", (tensors,), (True,), opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._run(of_tensors("reduce", _op(opts), opts.rootRank, tensors), "reduce", (tensors,), (True,), opts)

    # -- the same under a signature of the caller's, for `Group` -------------------------------------------------------

    def all_reduce_as(self, key: Key, tensor: Tensor, opts: Any) -> Work:
        return self._run(key, "allreduce", ([tensor],), (True,), opts)

    def broadcast_as(self, key: Key, tensor: Tensor, opts: Any) -> Work:
        return self._run(key, "broadcast", ([tensor],), (True,), opts)

    def all_gather_as(self, key: Key, outputs: list[Tensor], input: Tensor) -> Work:
        return self._run(key, "allgather", ([outputs], [input]), _BOTH, AllgatherOptions())

    def gather_as(self, key: Key, outputs: list[Tensor], input: Tensor, opts: Any) -> Work:
        return self._run(key, "gather", ([outputs] if outputs else [], [input]), _BOTH, opts)

    def reduce_as(self, key: Key, tensor: Tensor, opts: Any) -> Work:
        return self._run(key, "reduce", ([tensor],), (True,), opts)

    def exchange_as(self, key: Key, output: Tensor, input: Tensor, received: list[int], sent: list[int]) -> Work:
        return self._run(key, "alltoall_base", (output, input), _BOTH, received, sent, AllToAllOptions())

    # -- gathers ---------------------------------------------------------------------------------------------------

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(of_tensors("all_gather", None, None, inputs), "allgather", (outputs, inputs), _BOTH, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(
            of_tensors("all_gather_into_tensor", None, None, [input]), "_allgather_base", (output, input), _BOTH, opts
        )

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(
            of_tensors("all_gather_coalesced", None, None, inputs),
            "allgather_coalesced",
            (outputs, inputs),
            _BOTH,
            opts,
        )

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        key = of_tensors("all_gather_into_tensor", None, None, inputs)
        return self._run(key, "allgather_into_tensor_coalesced", (outputs, inputs), _BOTH, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        return self._run(of_tensors("gather", None, opts.rootRank, inputs), "gather", (outputs, inputs), _BOTH, opts)

    # -- scatters --------------------------------------------------------------------------------------------------

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        return self._run(of_tensors("scatter", None, opts.rootRank, outputs), "scatter", (outputs, inputs), _BOTH, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        key = of_tensors("reduce_scatter", _op(opts), None, inputs[0])
        return self._run(key, "reduce_scatter", (outputs, inputs), _BOTH, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        key = of_tensors("reduce_scatter_tensor", _op(opts), None, [input])
        return self._run(key, "_reduce_scatter_base", (output, input), _BOTH, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        key = of_tensors("reduce_scatter_tensor", _op(opts), None, inputs)
        return self._run(key, "reduce_scatter_tensor_coalesced", (outputs, inputs), _BOTH, opts)

    # -- all to all ------------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> Work:
        if output_splits or input_splits:
            # Each replica may have splits of its own, so they are compared in a way of their own before any data flows.
            self._compare_splits(output, input, output_splits, input_splits)
            key = ("all_to_all_single", None, None, input.device.type, ("splits", *input.shape[1:]), input.dtype)
        else:
            key = of_tensors("all_to_all_single", None, None, [input])
        return self._run(key, "alltoall_base", (output, input), _BOTH, output_splits, input_splits, opts)

    def _compare_splits(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        sent = torch.tensor(input_splits or _even(input.shape[0], self._size), dtype=torch.int64)
        expected = torch.tensor(output_splits or _even(output.shape[0], self._size), dtype=torch.int64)
        coming = torch.empty_like(sent)
        key = of_tensors("all_to_all_single", None, None, [sent])
        self._run(key, "alltoall_base", (coming, sent), _BOTH, [], [], AllToAllOptions()).wait()
        if not torch.equal(coming, expected):
            # Whoever expects other sizes than come raises; the others are told when this replica does not enter.
            raise ValueError(
                f"all_to_all_single: this replica expects {expected.tolist()} rows from the ranks, but they send "
                f"{coming.tolist()}. output_split_sizes[j] must be what rank j has as input_split_sizes for this rank."
            )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        key = ("all_to_all", None, None, inputs[0].device.type, "…", inputs[0].dtype)
        return self._run(key, "alltoall", (outputs, inputs), _BOTH, opts)

    # -- barriers --------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        given = opts or BarrierOptions()
        # A time limit of Gloo's own would break the connections when it passes; ours only frees the caller.
        inner = BarrierOptions()
        inner.device_ids, inner.device = given.device_ids, given.device
        kind = (
            given.device.type
            if given.device is not None and given.device.type in {each.type for each in self._devices}
            else "cpu"
        )
        if kind in self._ready().staged:
            kind = "cpu"
        return self._run(("barrier", None, None, kind), "barrier", (), (), inner, timeout=given.timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a time limit, whose error names all replicas that did not come."""
        own = TimeLimit()
        own.set(timeout)  # without one torch hands down its default
        limit = timedelta(seconds=own.seconds) if own.seconds is not None else None
        self._run(("monitored_barrier", None, None, "cpu"), "barrier", (), (), BarrierOptions(), timeout=limit).wait()

    # -- messages between two replicas -----------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        return self._message("send", tensors, False, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        return self._message("recv", tensors, True, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._message("recv_anysource", tensors, True, tag)

    # -- subgroups, coalescing -------------------------------------------------------------------------------------

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> GuardedProcessGroup | None:
        """A part of this group; None on replicas outside it. It connects when it is first used.

        Whatever backend is asked for (torch says it since 2.14), the part has those of the whole: one that carries each
        type of device.
        """
        name = str(group_name)
        if name.isdigit():
            # A name from torch's counter: every replica makes its groups in the same order. The counters themselves may
            # differ since an earlier failure, so the group gets its number in the ledger.
            name = str(self.note(("new_group", None, None, "cpu", tuple(ranks), "ranks")))
        made: GuardedProcessGroup | None = self._make_subgroup(self, list(ranks), name)
        if made is not None:
            made.set_timeout(timeout)
            made._set_group_name(group_name)
            made._set_group_desc(group_desc or "undefined")
        return made

    def _start_coalescing(self, device: torch.device) -> None:
        self._get_backend(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._get_backend(device)._end_coalescing()

    def _get_sequence_number_for_group(self) -> int:
        return self._ledger.number if self._ledger is not None else 0

    def _set_sequence_number_for_group(self) -> None:
        """The ledger numbers operations; there is nothing to agree on."""

    # torch's older names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _even(rows: int, size: int) -> list[int]:
    return [rows // size] * size
