"""A sharded model takes a part of the memory on each replica, and may be larger than a process can allocate."""

from __future__ import annotations

import pytest

from tests.ranks import Rank, run_ranks

pytestmark = pytest.mark.timeout(170)

_PROGRAM = """
import ctypes
import resource
import distnb

# By default, the C library keeps the memory of freed parameters. See "Memory on the CPU" in docs/sharded.md.
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)

torch.set_num_threads(1)
strategy = getattr(distnb, {strategy!r})(check_mean_loss=False)


def train(layers, width):
    with strategy.scope():
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()

    strategy.run(step)
    strategy.run(step)
    tensors = [*model.parameters(), *(each.grad for each in model.parameters())]
    tensors += [part for state in optimizer.state.values() for part in state.values()]
    return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in tensors)


def data_nbytes():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])


small = train(2, 500)  # loads modules of torch, whose memory does not count
limit = data_nbytes() + 220_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
result = {{"small": small, "large": train(12, 1600)}}  # 123 MB of parameters: 369 MB with gradients and momentum
"""


def ranks(strategy: str, number: int) -> list[Rank]:
    return run_ranks(_PROGRAM.format(strategy=strategy), number, timeout_s=150)


def test_a_model_larger_than_the_memory_of_a_process_is_trained() -> None:
    whole = 3 * 12 * 1600 * 1601 * 4
    for rank in ranks("ShardedStrategy", 4):
        assert rank.check().result["large"] <= 1.2 / 4 * whole
    mirrored = ranks("MirroredStrategy", 2)
    assert all(rank.returncode != 0 for rank in mirrored)
    assert any("allocate memory" in rank.stderr for rank in mirrored)
