"""The group as the rest of distnb uses it: a few operations with plain arguments."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
)

from distnb.collectives.group.process_group import OWN, GuardedProcessGroup
from distnb.collectives.shared_memory.shared_sum import GATHER, SharedWork
from distnb.collectives.verify.regions import Regions
from distnb.collectives.verify.signature import of_tensors
from distnb.errors import OptionError, StructureError
from distnb.topology import Device

__all__ = ["Group", "PendingCollective"]

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_NUMBERS = {name: hash(op) for name, op in _OPS.items()} | {"mean": hash(dist.ReduceOp.AVG)}
_CARRIED = frozenset({torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int32, torch.int64})
_MAX_DIMS = 13
_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]
_SMALL_NBYTES = 1024


def _options(op: str) -> Any:
    if op not in _OPS:
        raise OptionError(f"{op!r} is no reduce op of a group. The ops are {', '.join(map(repr, _OPS))}.")
    made: Any = AllreduceOptions()
    made.reduceOp = _OPS[op]
    return made


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as bytes, for dtypes that a backend does not carry. The tensor must be contiguous."""
    return tensor if tensor.dtype in _CARRIED else tensor.reshape(-1).view(torch.uint8)


class PendingCollective:
    """An operation under way. `wait` gives its result."""

    def __init__(self, work: Any, tensor: Tensor, divisor: int) -> None:
        self._work = work
        self._tensor = tensor
        self._divisor = divisor

    def wait(self) -> None:
        """Wait for the end; the tensor holds the result then. An abort ends the wait."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._divisor != 1:
                self._tensor.div_(self._divisor)


class Group:
    """The replicas of one program, as this one of them sees them.

    Attributes:
        process_group: torch's process group, which is its default one too.
        rank: This replica's id.
        size: How many replicas there are.
        device: This replica's device.
        devices: Every replica's device, in replica order.
        team_generation: That of the team whose group this is.
        regions: Where this replica is in its program.
    """

    def __init__(
        self, process_group: GuardedProcessGroup, device: Device, generation: int, devices: Sequence[Device]
    ) -> None:
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.device = device
        self.team_generation = generation
        self.devices = tuple(devices)
        self.regions: Regions = process_group.regions

    @property
    def generation(self) -> int:
        """Grows with the team's generation, and with errors that replicas caught: what they agreed on may be half."""
        breaks, number = self.process_group.positions.disturbed
        return self.team_generation + (breaks << 32) + (number << 64)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Replace the tensor on each replica by the sum (mean, max, min) over all.

        Args:
            tensor: Same shape and dtype everywhere; changed in place.
            op: "sum", "mean", "max" or "min".

        Raises:
            CollectiveMismatchError: Another replica called something else.
            ProgramAborted: The program was aborted.
        """
        self.all_reduce_start(tensor, op).wait()

    def all_reduce_start(self, tensor: Tensor, op: str = "sum") -> PendingCollective | SharedWork:
        """The same, under way while the caller goes on. The tensor must be left alone until its `wait`."""
        options = _options(op)  # refuses ops that there are not
        _check_mean(tensor, op)
        # Not torch's name: a replica that calls this and one that calls torch's would never meet.
        key = of_tensors(OWN + "all_reduce", _NUMBERS[op], None, [tensor])
        in_memory = self.process_group.start_in_memory(key, tensor, op)
        if in_memory is not None:
            return in_memory
        if tensor.is_contiguous():
            work = self.process_group.run(key, "allreduce", ([_view(tensor)],), (True,), options)
            return PendingCollective(work, tensor, self.size if op == "mean" else 1)
        whole = tensor.contiguous()
        self.process_group.run(key, "allreduce", ([_view(whole)],), (True,), options).wait()
        tensor.copy_(whole.div_(self.size) if op == "mean" else whole)
        return PendingCollective(None, tensor, 1)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every replica's tensor, in replica order. Shape and dtype must be the same everywhere."""
        key = of_tensors(OWN + "all_gather", None, None, [tensor])
        in_memory = self.process_group.start_in_memory(key, tensor, GATHER)
        if in_memory is not None:
            return in_memory.result()
        mine = tensor.detach().contiguous()
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        tensors = [[_bytes_of(each) for each in gathered]], [_bytes_of(mine)]
        self.process_group.run(key, "allgather", tensors, (True, False), AllgatherOptions()).wait()
        return gathered

    def all_gather_uneven(self, tensor: Tensor, dim: int = 0) -> list[Tensor]:
        """Every replica's tensor, in replica order, where sizes may differ along one dimension.

        Raises:
            StructureError: They differ in dtype, or along another dimension.
        """
        mine = tensor.detach()
        if mine.dim() > _MAX_DIMS:
            raise OptionError(f"A tensor of {mine.dim()} dimensions cannot be gathered; {_MAX_DIMS} is the most.")
        dim = dim % mine.dim() if mine.dim() else 0
        described = [_DTYPES.index(mine.dtype), mine.dim(), *mine.shape]
        header = torch.tensor(described + [0] * (_MAX_DIMS + 2 - len(described)), dtype=torch.int64, device=mine.device)
        headers = [each.tolist() for each in self.all_gather(header)]
        shapes = [tuple(each[2 : 2 + each[1]]) for each in headers]
        dtypes = [_DTYPES[each[0]] for each in headers]
        others = [shape[:dim] + shape[dim + 1 :] for shape in shapes]
        if len(set(zip(dtypes, map(len, shapes), others, strict=True))) > 1:
            told = "; ".join(f"replica {rank}: {dtypes[rank]} {list(shape)}" for rank, shape in enumerate(shapes))
            raise StructureError(
                f"The replicas' tensors can be gathered along dimension {dim} only if all else is equal; it is not: "
                f"{told}."
            )
        sizes = [shape[dim] if shape else 1 for shape in shapes]
        most = max(sizes)
        if most and min(sizes) < most:
            padded = mine.new_zeros([most if axis == dim else extent for axis, extent in enumerate(mine.shape)])
            padded.narrow(dim, 0, mine.shape[dim]).copy_(mine)
            mine = padded
        if not mine.numel():
            return [mine.new_empty(shape) for shape in shapes]
        gathered = self.all_gather(mine)
        if not mine.dim():
            return gathered
        return [each.narrow(dim, 0, size).contiguous() for each, size in zip(gathered, sizes, strict=True)]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace the tensor on each replica by the one of replica `source`."""
        self._check_replica(source, "broadcast from")
        whole = tensor.detach()
        key = of_tensors(OWN + "broadcast", None, source, [whole])
        here = self.rank == source
        in_memory = self.process_group.start_in_memory(key, whole, GATHER, () if here else (source,), wanted=here)
        if in_memory is not None:
            for received in in_memory.result():
                whole.copy_(received)
            return
        options = BroadcastOptions()
        options.rootRank = source
        if not whole.is_contiguous():
            whole = whole.contiguous()
        self.process_group.run(key, "broadcast", ([_bytes_of(whole)],), (True,), options).wait()
        if whole.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(whole)

    def reduce(self, tensor: Tensor, to: int = 0, op: str = "sum") -> Tensor | None:
        """The sum (mean, max, min) of all replicas' tensors, on one replica; None on the others.

        Args:
            tensor: Same shape and dtype everywhere; left as it is.
            to: Which replica gets the result.
            op: "sum", "mean", "max" or "min".
        """
        self._check_replica(to, "reduce to")
        _check_mean(tensor, op)
        options: Any = ReduceOptions()
        options.reduceOp, options.rootRank = _options(op).reduceOp, to
        message = tensor.detach().clone(memory_format=torch.contiguous_format)
        key = of_tensors(OWN + "reduce", _NUMBERS[op], to, [message])
        self.process_group.run(key, "reduce", ([_view(message)],), (True,), options).wait()
        if self.rank != to:
            return None
        return message.div_(self.size) if op == "mean" else message

    def gather(self, tensor: Tensor, to: int = 0) -> list[Tensor] | None:
        """Every replica's tensor, in replica order, on one replica; None on the others.

        Args:
            tensor: Same shape and dtype everywhere.
            to: Which replica gets them.
        """
        self._check_replica(to, "gather to")
        here = self.rank == to
        mine = tensor.detach()
        key = of_tensors(OWN + "gather", None, to, [mine])
        in_memory = self.process_group.start_in_memory(key, mine, GATHER, None if here else ())
        if in_memory is not None:
            parts = in_memory.result()
            return parts if here else None
        mine = mine.contiguous()
        gathered = [torch.empty_like(mine) for _ in range(self.size)] if here else []
        options: Any = GatherOptions()
        options.rootRank = to
        tensors = [[_bytes_of(each) for each in gathered]] if here else [], [_bytes_of(mine)]
        self.process_group.run(key, "gather", tensors, (True, False), options).wait()
        return gathered if here else None

    def exchange(self, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor | None:
        """One step in which replicas pass tensors to each other. Every replica calls it with the same pairs.

        Args:
            tensor: What this replica sends, if it does. Same shape and dtype everywhere.
            pairs: (source, target) of each message; a replica sends to one other at most, and gets from one at most.

        Returns:
            What this replica got; None if it is the target of no message.

        Raises:
            OptionError: A replica stands twice on one side, or there is no such replica.
        """
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        for each in (*sources, *targets):
            self._check_replica(each, "exchange with")
        if len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs) or any(a == b for a, b in pairs):
            raise OptionError(
                f"exchange got the pairs {list(pairs)}: in one step a replica sends to one other replica at most, and "
                "gets from one at most. Make two steps of it."
            )
        source = sources[targets.index(self.rank)] if self.rank in targets else None
        target = targets[sources.index(self.rank)] if self.rank in sources else None
        mine = tensor.detach()
        key = of_tensors(OWN + "exchange", None, ", ".join(f"{a}→{b}" for a, b in pairs), [mine])
        wanted = () if source is None else (source,)
        in_memory = self.process_group.start_in_memory(key, mine, GATHER, wanted, wanted=target is not None)
        if in_memory is not None:
            return next(iter(in_memory.result()), None)
        message = _bytes_of(mine.contiguous()).reshape(-1)
        got = torch.empty_like(mine, memory_format=torch.contiguous_format) if source is not None else None
        nothing, count = message.new_empty(0), message.numel()
        tensors = nothing if got is None else _bytes_of(got).reshape(-1), nothing if target is None else message
        received = [count if rank == source else 0 for rank in range(self.size)]
        sent = [count if rank == target else 0 for rank in range(self.size)]
        self.process_group.run(key, "alltoall_base", tensors, (True, False), received, sent, AllToAllOptions()).wait()
        return got

    def note(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Record something that all replicas do together, and that takes several collectives, under its own name.

        Args:
            operation: What it is, for the errors of all replicas if they do not.
            tensors: What it is about: of the same shapes and dtypes everywhere.

        Raises:
            CollectiveMismatchError: Another replica called something else.
        """
        self.process_group.note(of_tensors(operation, None, None, tensors))

    def note_pack(self, tensors: Sequence[Tensor], layout: object) -> None:
        """Record what is about to be sent as one message: replicas must do so alike. Communicates nothing itself.

        Args:
            tensors: What the message is made of.
            layout: Has an equal repr on all replicas, too.
        """
        self.process_group.note(of_tensors(OWN + "pack", None, None if layout is None else repr(layout), tensors))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every replica's value, in replica order, pickled. Small ones take one collective, larger ones two."""
        data = cloudpickle.dumps(value)
        heads = self._gather_bytes(len(data).to_bytes(8, "little") + data, _SMALL_NBYTES)
        sizes = [int.from_bytes(each[:8], "little") for each in heads]
        rest = max(sizes) - (_SMALL_NBYTES - 8)
        tails = self._gather_bytes(data[_SMALL_NBYTES - 8 :], rest) if rest > 0 else [b""] * self.size
        return [pickle.loads((head[8:] + tail)[:size]) for head, tail, size in zip(heads, tails, sizes, strict=True)]

    def _gather_bytes(self, content: bytes, nbytes: int) -> list[bytes]:
        """Every replica's bytes, each cut or filled up to a length."""
        mine = torch.frombuffer(bytearray(content[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
        return [each.numpy().tobytes() for each in self.all_gather(mine)]

    def _check_replica(self, replica: int, what: str) -> None:
        if not 0 <= replica < self.size:
            raise OptionError(f"There is no replica {replica} to {what}; there are {self.size}.")

    def barrier(self) -> None:
        """Wait until every replica is here."""
        self.process_group.barrier().wait()


def _check_mean(tensor: Tensor, op: str) -> None:
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise OptionError(
            f"The mean of a {tensor.dtype} tensor would be rounded. Convert it to a floating dtype first, or use "
            "op='sum'."
        )


def _view(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
