"""Programs for replicas that share a process group, each run as one program of a separate generation.

Every rank executes `run(names)` (see `test_groups.py` and `test_mismatch.py`). A case is a function of the group. Its
result or error is returned, with the time from its last mark to the error.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distnb.collectives.group import communicator
from distnb.collectives.group.interface import Group
from distnb.collectives.group.memberships import memberships
from distnb.topology import Device, Team

# torch has the new names since 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CASES: dict[str, Callable[[Group], Any]] = {}


@dataclass
class Ended:
    """The end of a case on one rank."""

    value: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""


def case(function: Callable[[Group], Any]) -> Callable[[Group], Any]:
    CASES[function.__name__] = function
    return function


def team(generation: int, engines: tuple[int, ...] | None = None) -> Team:
    size = int(os.environ["WORLD_SIZE"])
    return Team(
        engines=engines or tuple(range(size)),
        devices=(Device("cpu"),) * (len(engines) if engines else size),
        generation=generation,
        store_host=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
    )


class Meeting:
    """A barrier that does not use the code under test."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, None, False, wait_for_workers=False, timeout=timedelta(seconds=60))

    def meet(self, what: str) -> None:
        self.store.set(f"meeting/{what}/{self.rank}", "here")
        self.store.wait([f"meeting/{what}/{rank}" for rank in range(self.size)])


def run(names: list[str]) -> dict[str, Ended]:
    """Run the cases one after another, also after a failure."""
    meeting, ended = Meeting(), {}
    for generation, name in enumerate(names):
        meeting.meet(name)
        group = memberships.join(team(generation), meeting.rank, Device("cpu"))
        ended[name] = _run_one(CASES[name], generation + 1, group)
    return ended


def _run_one(function: Callable[[Group], Any], program: int, group: Group) -> Ended:
    memberships.program_began(program)
    result = Ended()
    try:
        result.value = function(group)
        memberships.program_completed()
    except BaseException as error:
        result.error, result.text = type(error).__name__, str(error)
        result.trace = traceback.format_exc()
        memberships.program_failed()
    return result


# -- supported cases -------------------------------------------------------------------------------------------------


@case
def everything(group: Group) -> Any:
    """Run every operation once, through our own interface and through torch's, and check the sums."""
    rank, size = group.rank, group.size
    tensor = torch.full((10,), rank + 1.0)
    total = size * (size + 1) / 2
    group.all_reduce(tensor)
    assert tensor.tolist() == [total] * 10
    for op, expected in (("mean", (size + 1) / 2), ("max", size), ("min", 1)):
        tensor = torch.tensor([rank + 1.0], dtype=torch.float64)
        group.all_reduce(tensor, op)
        assert tensor.item() == expected, op
    transposed = torch.full((2, 3), float(rank)).t()
    group.all_reduce(transposed)
    assert transposed.tolist() == [[total - size] * 2] * 3
    pending = group.all_reduce_start(tensor.fill_(1))
    pending.wait()
    assert tensor.item() == size
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int64, torch.uint8):
        gathered = group.all_gather(torch.tensor([[rank], [1]]).to(dtype))
        assert [each[0, 0].item() for each in gathered] == [torch.tensor(r).to(dtype).item() for r in range(size)], (
            dtype
        )
        moved = torch.tensor([rank, 1]).to(dtype)
        group.broadcast(moved, size - 1)
        assert moved[0].item() == torch.tensor(size - 1).to(dtype).item()
    uneven = group.all_gather_uneven(torch.full((2, rank), float(rank)), dim=1)
    assert [list(each.shape) for each in uneven] == [[2, r] for r in range(size)]
    assert group.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    big = "x" * 5000 * rank
    assert group.all_gather_object(big) == ["x" * 5000 * r for r in range(size)]
    group.barrier()
    _raw(rank, size)
    return dist.get_backend(), dist.get_world_size(), os.environ["RANK"]


def _raw(rank: int, size: int) -> None:
    dist.init_process_group("nccl", rank=rank, world_size=size)  # with any backend, the existing group is adopted
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == size
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.is_completed()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, ("rank", rank))
    assert found == [("rank", r) for r in range(size)]
    values = [{"a": 1}, "two"] if rank == 0 else [None, None]
    dist.broadcast_object_list(values, src=0)
    assert values == [{"a": 1}, "two"]
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert taken == [f"for {rank}"]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered is None or gathered == list(range(size))
    dist.reduce(tensor, dst=0)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part[0].item() for part in parts] == list(range(size))
    whole = torch.zeros(2 * size)
    _all_gather(whole, torch.full((2,), float(rank)))
    assert whole[-1] == size - 1
    part = torch.zeros(2)
    _reduce_scatter(part, torch.ones(2 * size))
    assert part[0] == size
    dist.reduce_scatter(part, [torch.ones(2) * r for r in range(size)])
    assert part[0] == size * rank
    numbers = torch.arange(2.0 * size) + 10 * rank
    work = _reduce_scatter(part, numbers, op=dist.ReduceOp.MAX, async_op=True)
    work.get_future().wait()
    assert part.tolist() == [2.0 * rank + 10 * (size - 1), 2.0 * rank + 1 + 10 * (size - 1)]
    work.wait()
    assert work.is_completed()
    assert numbers[0] == 10 * rank  # unchanged
    uneven = torch.zeros(rank + 1)
    dist.reduce_scatter(uneven, [torch.ones(r + 1) for r in range(size)])
    assert uneven.tolist() == [size] * (rank + 1)
    both = torch.zeros(1), torch.zeros(2, 1)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for each in both:
            _reduce_scatter(each, torch.full((size * len(each), *each.shape[1:]), rank + 1.0))
    manager.wait()
    assert {value for each in both for value in each.flatten().tolist()} == {size * (size + 1) / 2}
    for wrong in (torch.ones(2 * size + 1), torch.ones(4 * size), torch.ones(2 * size, dtype=torch.float64)):
        with contextlib.suppress(ValueError):
            _reduce_scatter(part, wrong)
            raise AssertionError(f"{wrong.shape}, {wrong.dtype} were taken")
    out = torch.zeros(size)
    dist.all_to_all_single(out, torch.full((size,), float(rank)))
    assert out.tolist() == list(range(size))
    splits = [r + 1 for r in range(size)]
    out = torch.zeros((rank + 1) * size)
    dist.all_to_all_single(out, torch.ones(sum(splits)), [rank + 1] * size, splits)
    _messages(rank, size)
    subgroup = dist.new_group(list(range(1, size)))
    if rank:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=subgroup)
        assert tensor.item() == size - 1
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    with dist.distributed_c10d._coalescing_manager(async_ops=False):
        for _ in range(2):
            dist.all_reduce(part)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.is_initialized()
    dist.barrier()


def _messages(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(2)
    sending = dist.isend(torch.full((2,), float(rank)), right)
    dist.recv(got, left)
    sending.wait()
    assert got[0] == left
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, got + 1, right), dist.P2POp(dist.irecv, got, left)])
    for work in works:
        work.wait()
    if rank == 0:
        for _ in range(size - 1):
            dist.recv(got)
            assert got[0] > 0
    else:
        dist.send(torch.full((2,), float(rank)), 0)


@case
def functional(group: Group) -> Any:
    """Run the collectives that torch.compile and DTensor use."""
    from torch.distributed import _functional_collectives as functional

    tensor = torch.ones(4) * (group.rank + 1)
    total = functional.all_reduce(tensor, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(tensor, 0, dist.group.WORLD)
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * group.size), "sum", 0, dist.group.WORLD)
    return total.tolist()[0], gathered.tolist()[-1], scattered.tolist()


@case
def training_with_ddp(group: Group) -> Any:
    torch.manual_seed(group.rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    for _ in range(3):
        model(torch.ones(2, 8) * (group.rank + 1)).sum().backward()
    return model.module.weight.grad.sum().item(), model.module.weight.sum().item()


@case
def mesh(group: Group) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    made = init_device_mesh("cpu", (group.size,))
    sharded = distribute_tensor(torch.arange(8.0), made, [Shard(0)])
    return sharded.full_tensor().tolist(), made.get_group().size()


@case
def own_lines(group: Group) -> Any:
    """Call collectives from different lines on the replicas, in turn."""
    tensor = torch.zeros(4)
    for step in range(100):
        if group.rank == 0:
            dist.broadcast(tensor.fill_(step), src=0)
        else:
            dist.broadcast(tensor, src=0)
        assert tensor[0] == step
        for source in range(group.size):
            if source == group.rank:
                dist.broadcast(tensor.fill_(source), src=source)
            else:
                dist.broadcast(tensor, src=source)
            assert tensor[0] == source
    for turn in range(group.size):
        if turn == group.rank:
            dist.barrier()
        else:
            dist.barrier()
    return True


@case
def slow_replica(group: Group) -> Any:
    """Check that a slow replica does not count as lost."""
    if group.rank == 1:
        time.sleep(3.0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


@case
def far_ahead(group: Group) -> Any:
    """Let one replica run ahead of the others by more calls than they remember."""
    tensor = torch.zeros(1)
    if group.rank != 0:
        time.sleep(1.0)
    works = [dist.broadcast(tensor + step, src=0, async_op=True) for step in range(5000)]
    for work in works:
        work.wait()
    return len(works)


# -- collectives that do not match ------------------------------------------------------------------------------------


@case
def other_operation(group: Group) -> None:
    tensor = torch.ones(10)
    if group.rank == 0:
        group.all_reduce(tensor)
    else:
        group.broadcast(tensor)


@case
def other_operation_late(group: Group) -> None:
    tensor = torch.ones(10)
    if group.rank == 0:
        dist.all_reduce(tensor)
    else:
        time.sleep(1.0)
        dist.all_gather([torch.ones(10) for _ in range(group.size)], tensor)


def _apart(group: Group, mine: Callable[[], Any], others: Callable[[], Any]) -> None:
    # With known signatures and lines, as in a training loop that has run for a while.
    for _ in range(20):
        mine()
        others()
    if group.rank == group.size - 1:
        others()
    else:
        mine()


@case
def other_shape_known(group: Group) -> None:
    small, large = torch.ones(10), torch.ones(20)
    _apart(group, lambda: dist.all_reduce(small), lambda: dist.all_reduce(large))


@case
def other_shape_large(group: Group) -> None:
    dist.all_reduce(torch.ones(1_000_000 * (1 + (group.rank == 0))))


@case
def other_dtype(group: Group) -> None:
    whole, real = torch.ones(8, dtype=torch.int64), torch.ones(8, dtype=torch.float64)
    _apart(group, lambda: dist.all_reduce(whole), lambda: dist.all_reduce(real))


@case
def other_reduce_op(group: Group) -> None:
    group.all_reduce(torch.ones(3), "sum" if group.rank else "max")


@case
def other_root(group: Group) -> None:
    dist.broadcast(torch.ones(3), src=min(group.rank, 1))
    dist.barrier()  # the replicas that agree may be done before the other one comes


@case
def swapped_order(group: Group) -> None:
    first, second = torch.ones(5), torch.ones(5) * 2

    def sum_first() -> None:
        dist.all_reduce(first)

    def sum_second() -> None:
        dist.all_reduce(second)

    if group.rank == 0:
        sum_first()
        sum_second()
    else:
        sum_second()
        sum_first()


@case
def swapped_order_in_a_loop(group: Group) -> None:
    values = {"a": torch.ones(5), "b": torch.ones(5)}
    for _ in range(3):
        for name in ("a", "b") if group.rank == 0 else ("b", "a"):
            if name == "a":
                dist.all_reduce(values["a"])
            if name == "b":
                dist.all_reduce(values["b"])


@case
def fewer_calls(group: Group) -> None:
    dist.all_reduce(torch.ones(2))
    if group.rank != 1:
        dist.all_reduce(torch.ones(3))


@case
def fewer_calls_late(group: Group) -> None:
    if group.rank != 1:
        dist.barrier()
    time.sleep(1.0)


@case
def never_waited(group: Group) -> Any:
    """Start a collective on one replica, and end its program without waiting for it."""
    if group.rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    return True


@case
def backward_against_all_reduce(group: Group) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    loss = model(torch.ones(2, 8)).sum()
    if group.rank == 0:
        loss.backward()
    else:
        dist.all_reduce(torch.ones(7))


@case
def other_order_of_subgroups(group: Group) -> None:
    ranks = list(range(group.size))
    if group.rank == 0:
        dist.new_group(ranks)
        dist.new_group([0])
    else:
        dist.new_group([0])
        dist.new_group(ranks)
    dist.barrier()


@case
def subgroup_apart(group: Group) -> None:
    part = dist.new_group(list(range(group.size)))
    dist.all_reduce(torch.ones(2), group=part)
    dist.all_reduce(torch.ones(2 + (group.rank > 0)), group=part)


@case
def subgroup_unused(group: Group) -> None:
    part = dist.new_group(list(range(group.size)))
    if group.rank == 0:
        dist.all_reduce(torch.ones(2), group=part)


@case
def refused_arguments(group: Group) -> None:
    """Call a collective with arguments that torch refuses on one replica, which the others cannot know."""
    mine = torch.ones(3)
    outputs = [torch.ones(3 if group.rank != 1 else 4) for _ in range(group.size)]
    try:
        dist.all_gather(outputs, mine)
    except (ValueError, RuntimeError) as error:
        if group.rank != 1 or "match" in type(error).__name__.lower():
            raise
    dist.barrier()


@case
def splits_apart(group: Group) -> None:
    splits = [1] * group.size
    dist.all_to_all_single(
        torch.zeros(group.size + (group.rank == 1)),
        torch.ones(group.size),
        [1 + (group.rank == 1), *splits[1:]],
        splits,
    )


@case
def other_error(group: Group) -> None:
    """Raise an unrelated error on one replica, in a program without a notebook that could inform the others."""
    if group.rank == 1:
        raise ValueError("mine")
    dist.all_reduce(torch.ones(1))


@case
def sum_after_all(group: Group) -> Any:
    """Compute a sum between the other cases: the next generation must work."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return tensor.sum().item() / 1000


# -- aborts -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def aborted_soon(reason: str) -> Iterator[None]:
    """Abort the block on each replica from a separate thread.

    The first to abort closes its connections. That the others are notified too, and do not merely find them closed, is up
    to when their threads run: so they wait for it as long as it takes.
    """

    def strike() -> None:
        memberships.abort(reason)

    grace, communicator._ABORT_GRACE_S = communicator._ABORT_GRACE_S, 60.0
    timer = threading.Timer(0.5, strike)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        communicator._ABORT_GRACE_S = grace


@case
def aborted_receive(group: Group) -> None:
    with aborted_soon("the test wants it"):
        dist.recv(torch.zeros(3), (group.rank + 1) % group.size)


@case
def aborted_deadlock(group: Group) -> None:
    """Let all replicas wait for each other."""
    with aborted_soon("the test wants it"):
        if group.rank == 0:
            dist.recv(torch.zeros(3), 1)
        else:
            dist.all_reduce(torch.ones(5))


@case
def aborted_future(group: Group) -> None:
    with aborted_soon("the test wants it"):
        if group.rank == 0:
            dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        else:
            dist.recv(torch.zeros(3), 0)


@case
def aborted_before(group: Group) -> None:
    memberships.abort("the test wants it")
    with contextlib.suppress(Exception):
        group.barrier()
    dist.all_reduce(torch.ones(1))


@case
def whole_against_part(group: Group) -> None:
    """Let the replicas wait for each other in two groups, although each group's calls match."""
    part = dist.new_group(list(range(group.size)))
    dist.all_reduce(torch.ones(1), group=part)
    if group.rank == 0:
        dist.all_reduce(torch.ones(2), group=part)
    dist.all_reduce(torch.ones(3))
    if group.rank != 0:
        dist.all_reduce(torch.ones(2), group=part)


@case
def whole_against_unconnected_part(group: Group) -> None:
    part = dist.new_group(list(range(group.size)))
    if group.rank == 0:
        dist.all_reduce(torch.ones(2), group=part)
    else:
        dist.all_reduce(torch.ones(3))
