"""Reductions in shared memory: correct sums under all conditions, and a wait that always ends."""

from __future__ import annotations

import signal
from textwrap import dedent

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

_START = """
import threading, time
from distnb.collectives.group.memberships import memberships
group = memberships.join_from_env()
assert group.process_group.communicator.shared is not None, "this machine's replicas share memory"
rank, size = group.rank, group.size

def waits():
    # Whether the main thread is in an operation of the group, or was just now.
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != "all_reduce":
        frame = frame.f_back
    return frame is not None

def in_the_wait(call):
    # From another thread, when the main one has been waiting for a while.
    def when_it_waits():
        while not waits():
            time.sleep(0.01)
        time.sleep(0.5)
        call()
    threading.Thread(target=when_it_waits).start()

ended = os.path.join(os.path.dirname(os.environ["DISTNB_TEST_RESULT"]), "ended")

def stay():
    while not os.path.exists(ended):
        time.sleep(0.01)
"""


@pytest.mark.parametrize("n", [2, 3])
def test_many_simultaneous_random_reductions_are_correct(n: int) -> None:
    program = """
    import random
    from distnb.collectives.shared_memory.shared_sum import SHARDS
    from distnb.collectives.verify.signature import of_tensors
    choose, alone = random.Random(7), random.Random(rank)
    waiting, shards = [], []
    memory = group.process_group.shared_memory("cpu")

    def start(whole, shard, op):
        return group.process_group.start_sharded(of_tensors(op, None, None, [whole]), shard, whole, op)

    def gather_shards(number, numel):
        # In the common memory, or where this replica chooses to have it.
        whole = memory.common_room(size * numel, torch.float32) if alone.random() < 0.7 else None
        whole = torch.empty(size * numel) if whole is None else whole
        shard = whole.view(size, -1)[rank].fill_(number + 1000 * rank)
        shards.append((start(whole, shard, SHARDS), whole, number, numel))

    def scatter(number, numel):
        whole = memory.room(size * numel, torch.float32) if alone.random() < 0.7 else None
        whole = torch.empty(size * numel) if whole is None else whole
        whole.view(size, -1).copy_(torch.arange(1.0, size + 1).unsqueeze(1) * (rank + 1)).add_(number)
        shard = torch.empty(numel)
        expected = size * number + (rank + 1) * size * (size + 1) // 2
        waiting.append((start(whole, shard, "sum"), shard, expected))

    for number in range(600):
        numel = choose.choice([1, 5, 1000, 60_000, 400_000])
        dtype = choose.choice([torch.float32, torch.float64, torch.int64, torch.bfloat16])
        op = choose.choice(["sum", "max", "min"])
        tensor = torch.full((numel,), rank + number % 50 + 1).to(dtype)
        if choose.random() < 0.3:
            tensor = torch.stack([tensor, tensor], 1)[:, 0]  # not contiguous
        least = number % 50 + 1
        expected = {"sum": size * least + size * (size - 1) // 2, "max": least + size - 1, "min": least}[op]
        waiting.append((group.all_reduce_start(tensor, op), tensor, expected))
        if choose.random() < 0.1:
            gathered = group.all_gather(torch.tensor([rank, number]))
            assert [each.tolist() for each in gathered] == [[r, number] for r in range(size)]
        if choose.random() < 0.3:
            choose.choice([gather_shards, scatter])(number, choose.choice([1, 1000, 100_000]))
        while len(shards) > alone.randrange(5):
            work, whole, value, numel = shards.pop(0)
            work.wait()
            assert (whole.view(size, -1) == torch.arange(size).unsqueeze(1) * 1000 + value).all(), value
            del work
        while len(waiting) > choose.randrange(12):
            work, done, value = waiting.pop(choose.randrange(len(waiting)))
            work.wait()
            assert (done == value).all(), (number, done, value)
        if choose.random() < 0.02 and waiting:
            waiting.pop()  # without a wait
    for work, done, value in waiting:
        work.wait()
        assert (done == value).all()
    mean = torch.tensor([float(rank)])
    group.all_reduce(mean, "mean")
    assert mean.item() == (size - 1) / 2
    result = "done"
    """
    for rank in run_ranks(_START + dedent(program), n):
        assert rank.check().result == "done"


def test_every_replica_gets_the_same_bits() -> None:
    program = """
    torch.manual_seed(rank)
    tensor = torch.randn(100_001)
    group.all_reduce(tensor)
    result = tensor.numpy().tobytes()
    """
    results = [rank.check().result for rank in run_ranks(_START + dedent(program), 3)]
    assert results[0] == results[1] == results[2]


def test_memory_first_used_in_inference_mode_serves_training_too() -> None:
    program = """
    result = []
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            tensor = torch.ones(3) * (rank + 1)
            group.all_reduce(tensor)
            result.append(tensor.tolist())
    """
    for rank in run_ranks(_START + dedent(program), 2):
        assert rank.check().result == [[3.0] * 3] * 3


def test_an_abort_ends_the_wait_at_once() -> None:
    program = """
    from distnb.errors import ProgramAborted
    group.all_reduce(torch.ones(3))
    result = None
    if rank == 0:
        in_the_wait(lambda: memberships.abort("another replica failed"))
        try:
            group.all_reduce(torch.ones(3))
        except ProgramAborted as error:
            result = str(error)
        finally:
            open(ended, "w").close()
    else:
        stay()
    """
    assert run_ranks(_START + dedent(program), 2)[0].check().result == "another replica failed"


def test_ctrl_c_ends_the_wait() -> None:
    program = """
    import signal
    result = None
    if rank == 0:
        in_the_wait(lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
        try:
            group.all_reduce(torch.ones(3))
        except KeyboardInterrupt:
            result = "interrupted"
        finally:
            open(ended, "w").close()
    else:
        stay()
    """
    assert run_ranks(_START + dedent(program), 2)[0].check().result == "interrupted"


def test_the_death_of_a_replica_ends_the_wait() -> None:
    program = """
    import signal
    from distnb.errors import CollectiveError
    group.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(torch.ones(3))
    except CollectiveError as error:
        result = str(error)
    """
    ranks = run_ranks(_START + dedent(program), 2)
    assert ranks[1].returncode == -signal.SIGKILL
    assert "may have died" in ranks[0].check().result


def test_too_many_pending_reductions_are_an_error() -> None:
    program = """
    from distnb.errors import CollectiveError
    started = []
    try:
        for _ in range(300):
            started.append(group.all_reduce_start(torch.ones(3)))
    except CollectiveError as error:
        result = str(error)
    """
    for rank in run_ranks(_START + dedent(program), 2):
        assert "Call wait()" in rank.check().result
