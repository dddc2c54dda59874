"""The group as the rest of distnb uses it: a few operations with plain arguments."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from distnb.collectives.group.process_group import OWN, GuardedProcessGroup
from distnb.collectives.shared_memory.shared_sum import GATHER, SharedWork, Write
from distnb.collectives.verify.program_calls import ProgramCalls
from distnb.collectives.verify.signature import Key, of_tensors
from distnb.compat.c10d_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
)
from distnb.errors import OptionError, StructureError
from distnb.options import ReduceOp
from distnb.topology import Device

__all__ = ["Group", "PendingCollective"]

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_NUMBERS = {name: hash(op) for name, op in _OPS.items()} | {"mean": hash(dist.ReduceOp.AVG)}
_CARRIED = frozenset({torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int32, torch.int64})
_SMALL_NBYTES = 1024


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes if the backend does not carry its dtype."""
    return tensor if tensor.dtype in _CARRIED else tensor.reshape(-1).view(torch.uint8)


class PendingCollective:
    """A reduction under way in a tensor's own memory or in a contiguous copy. Without a work it is complete."""

    def __init__(self, work: Any, tensor: Tensor, divisor: int, whole: Tensor | None = None) -> None:
        self._work = work
        self._tensor = tensor
        self._divisor = divisor
        self._whole = tensor if whole is None else whole

    def wait(self) -> None:
        """Wait for the end, when the tensor holds the result. An abort ends the wait."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._divisor == 1 and self._whole is self._tensor:
            return
        with torch.no_grad():
            if self._divisor != 1:
                self._whole.div_(self._divisor)
            if self._whole is not self._tensor:
                self._tensor.copy_(self._whole)


class Group:
    """The replicas of one program, as this replica sees them.

    *Every* replica calls each method that communicates, in the same order and with a tensor of the same shape and
    dtype, even if it sends or receives nothing. The calls are recorded and compared: if they differ, every replica
    raises `CollectiveMismatchError`; if one replica raises or dies, the others do not wait for it.

    Attributes:
        process_group: torch's process group, which is its default group, too.
        rank: This replica's id.
        size: The number of replicas.
        device: This replica's device.
        devices: Every replica's device, in replica order.
        generation: The generation of the team.
        calls: The counts of this replica's program.
    """

    def __init__(
        self, process_group: GuardedProcessGroup, device: Device, generation: int, devices: Sequence[Device]
    ) -> None:
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.device = device
        self.generation = generation
        self.devices = tuple(devices)
        self.calls: ProgramCalls = process_group.calls

    def begin_call(self) -> ProgramCalls:
        """Count a call of `strategy.run` or a scope. Raise the error that ended the program, if one was caught."""
        communicator = self.process_group.communicator
        if communicator.failure is not None:
            communicator.raise_failure()
        self.calls.cross()
        return self.calls

    def fail_call(self, error: BaseException) -> None:
        """Note an error that leaves a call of `strategy.run`, and report it to the others, which may wait there."""
        self.calls.fail("strategy.run", error)
        self.process_group.communicator.report_failed_call()

    def meet_after_call(self, digest: int) -> bool | None:
        """Wait until `strategy.run` has returned from the function on all replicas.

        Returns:
            Whether the digests of the results are equal on all of them. If this is unknown, False. None if the function
            has raised on a replica, which does not come here.
        """
        contents = self.process_group.meet(of_tensors("strategy.run's result", None, None, ()), f"{digest:x}")
        return None if contents is None else len(set(contents)) == 1

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "sum") -> Tensor:
        """Replace each replica's tensor by the "sum" ("mean", "max", "min") of all, and return it."""
        self.all_reduce_start(tensor, op).wait()
        return tensor

    def all_reduce_start(
        self, tensor: Tensor, op: ReduceOp | str = "sum", write: Write | None = None
    ) -> PendingCollective | SharedWork:
        """Start `all_reduce` and return it under way. The tensor must not be used until its `wait`.

        Args:
            write: Writes this replica's tensor to the memory that it is given, which may be that of the others instead
                of `tensor`. By default the content of `tensor` is reduced.
        """
        return self._reduce("all_reduce", tensor, op, None, write)

    def reduce(self, tensor: Tensor, to: int = 0, op: ReduceOp | str = "sum") -> Tensor | None:
        """Return the sum (mean, max, min) of all replicas' tensors on one replica, and None on the others."""
        self._check_replica(to, "reduce to")
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._reduce("reduce", total, op, to).wait()
        return total if self.rank == to else None

    def _reduce(
        self, word: str, tensor: Tensor, op: ReduceOp | str, root: int | None, write: Write | None = None
    ) -> PendingCollective | SharedWork:
        op = (op.value if isinstance(op, ReduceOp) else op).lower()
        if op not in _OPS:
            raise OptionError(f"{op!r} is no reduce op of a group. The ops are {', '.join(map(repr, _OPS))}.")
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise OptionError(
                f"The mean of a {tensor.dtype} tensor would be rounded. Convert it to a floating dtype first, or use "
                "op='sum'."
            )
        # The name differs from torch's, because a replica that calls this and one that calls torch's would never meet.
        key = of_tensors(OWN + word, _NUMBERS[op], root, [tensor])
        if write is not None and tensor.device.type != "cpu":
            write(tensor)  # one copy to the host is faster than one for each part of the tensor
            write = None
        in_memory = self.process_group.start_in_memory(key, tensor, op, write=write)
        if in_memory is not None:
            return in_memory
        if write is not None:
            write(tensor)
        whole = tensor.contiguous()
        options: Any = AllreduceOptions()
        options.reduceOp = _OPS[op]
        work = self.process_group.run(key, "allreduce", ([_view(whole)],), (True,), options)
        return PendingCollective(work, tensor, self.size if op == "mean" else 1, whole)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every replica's tensor, in replica order. Shape and dtype must be the same everywhere."""
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
        """Return every replica's tensor, in replica order. Sizes may differ along one dimension.

        Raises:
            StructureError: They differ in dtype, or along another dimension.
        """
        mine = tensor.detach()
        dim = dim % mine.dim() if mine.dim() else 0
        described = self.all_gather_object((mine.dtype, tuple(mine.shape)))
        shapes = [shape for _, shape in described]
        if len({(dtype, len(shape), shape[:dim] + shape[dim + 1 :]) for dtype, shape in described}) > 1:
            held = "; ".join(f"replica {rank}: {dtype} {list(shape)}" for rank, (dtype, shape) in enumerate(described))
            raise StructureError(
                f"The replicas' tensors can be gathered along dimension {dim} only if all else is equal; it is not: "
                f"{held}."
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

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Replace the tensor on each replica by the one of replica `source`, and return it."""
        self._check_replica(source, "broadcast from")
        whole = tensor.detach()
        key = of_tensors(OWN + "broadcast", None, source, [whole])
        here = self.rank == source
        in_memory = self.process_group.start_in_memory(key, whole, GATHER, () if here else (source,), wanted=here)
        if in_memory is not None:
            for received in in_memory.result():
                whole.copy_(received)
            return tensor
        options = BroadcastOptions()
        options.rootRank = source
        if not whole.is_contiguous():
            whole = whole.contiguous()
        self.process_group.run(key, "broadcast", ([_bytes_of(whole)],), (True,), options).wait()
        if whole.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(whole)
        return tensor

    def gather(self, tensor: Tensor, to: int = 0) -> list[Tensor] | None:
        """Return every replica's tensor, of equal shapes and dtypes, on one replica, and None on the others."""
        self._check_replica(to, "gather to")
        key = of_tensors(OWN + "gather", None, to, [tensor])
        parts = self._pass_on(key, tensor, range(self.size) if self.rank == to else (), (to,))
        return parts if self.rank == to else None

    def exchange(self, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor | None:
        """Send tensors between replicas in one step. Every replica calls it with the same pairs.

        Args:
            tensor: The tensor that this replica sends, if it sends one. Shape and dtype are the same everywhere.
            pairs: (source, target) of each message. A replica sends at most one message and receives at most one.

        Returns:
            The tensor that this replica received, or None.

        Raises:
            OptionError: A replica is named twice on one side, or does not exist.
        """
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        for each in (*sources, *targets):
            self._check_replica(each, "exchange with")
        if len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs) or any(a == b for a, b in pairs):
            raise OptionError(
                f"exchange got the pairs {list(pairs)}: in one step a replica sends to one other replica at most, and "
                "gets from one at most. Make two steps of it."
            )
        key = of_tensors(OWN + "exchange", None, ", ".join(f"{a}→{b}" for a, b in pairs), [tensor])
        mine = [source for source, target in pairs if target == self.rank]
        return next(iter(self._pass_on(key, tensor, mine, [b for a, b in pairs if a == self.rank])), None)

    def _pass_on(self, key: Key, tensor: Tensor, sources: Sequence[int], targets: Sequence[int]) -> list[Tensor]:
        """Send a tensor to a replica or to none, and receive those of the sources. Shapes and dtypes are equal."""
        mine = tensor.detach()
        in_memory = self.process_group.start_in_memory(key, mine, GATHER, sources, wanted=bool(targets))
        if in_memory is not None:
            return in_memory.result()
        message = _bytes_of(mine.contiguous()).reshape(-1)
        count = message.numel()
        received, sent = ([count * (rank in them) for rank in range(self.size)] for them in (sources, targets))
        got = mine.new_empty((len(sources), *mine.shape))
        tensors = _bytes_of(got).reshape(-1), message if targets else message.new_empty(0)
        self.process_group.run(key, "alltoall_base", tensors, (True, False), received, sent, AllToAllOptions()).wait()
        return list(got)

    def note(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Record an operation of all replicas that consists of several collectives, under its own name.

        Raises CollectiveMismatchError if another replica's operation, shapes or dtypes differ.
        """
        self.process_group.note(of_tensors(operation, None, None, tensors))

    def note_pack(self, tensors: Sequence[Tensor], layout: object) -> None:
        """Record a message that is about to be sent: its tensors, and a layout whose repr is equal on all replicas."""
        self.process_group.note(of_tensors(OWN + "pack", None, None if layout is None else repr(layout), tensors))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every replica's value, in replica order. A small pickle takes one collective, a larger one takes
        two."""
        data = cloudpickle.dumps(value)
        heads = self._gather_bytes(len(data).to_bytes(8, "little") + data, _SMALL_NBYTES)
        sizes = [int.from_bytes(each[:8], "little") for each in heads]
        rest = max(sizes) - (_SMALL_NBYTES - 8)
        tails = self._gather_bytes(data[_SMALL_NBYTES - 8 :], rest) if rest > 0 else [b""] * self.size
        return [pickle.loads((head[8:] + tail)[:size]) for head, tail, size in zip(heads, tails, sizes, strict=True)]

    def _gather_bytes(self, content: bytes, nbytes: int) -> list[bytes]:
        """Return every replica's bytes, each cut or filled up to a length."""
        mine = torch.frombuffer(bytearray(content[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
        return [each.numpy().tobytes() for each in self.all_gather(mine)]

    def _check_replica(self, replica: int, what: str) -> None:
        if not 0 <= replica < self.size:
            raise OptionError(f"There is no replica {replica} to {what}; there are {self.size}.")

    def barrier(self) -> None:
        """Wait until every replica is here."""
        self.process_group.barrier().wait()


def _view(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
