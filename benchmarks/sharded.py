"""A sharded model against plain FSDP2 and against mirrored variables: the time of a training step, and memory.

    python -m benchmarks.sharded [--rounds 7] [--steps 5]

A transformer of six blocks (19 MB of parameters) with AdamW, one thread per replica, on the CPU. The peer shards the
same blocks by torch's `fully_shard`, in torchrun's environment. Memory is counted twice: the bytes of this replica's
parameters, gradients and optimizer state; and, for a larger model (24 blocks, 303 MB), what its training adds to the
resident memory of a process whose C library returns large blocks of memory (MALLOC_MMAP_THRESHOLD_). Memory
that processes share counts for each of them in part.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import nn

import distnb
from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, Target, compare, options, report
from benchmarks.ranks import Ranks, serve

_ROWS, _LENGTH = 8, 32
_SIZES = {"small": (256, 6), "large": (512, 24)}  # the width, and the number of blocks


def _make_model(size: str) -> nn.Module:
    width, blocks = _SIZES[size]
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(64, width), nn.TransformerEncoder(block, blocks), nn.Linear(width, 10))


def _with_fsdp(size: str, replicas: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], float]]:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = _make_model(size)
    for block in model.get_submodule("1.layers").children():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, functools.partial(_repeat, functools.partial(_step, model, optimizer, _batch(replicas)))


def _with_distnb(
    name: str, size: str, replicas: int
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], float]]:
    strategy: Any = getattr(distnb, name)(check_mean_loss=False)
    torch.manual_seed(0)
    with strategy.scope():
        model = _make_model(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = _batch(replicas)
    return model, optimizer, functools.partial(_repeat, lambda: strategy.run(_step, (model, optimizer, batch)))


def _batch(replicas: int) -> torch.Tensor:
    return torch.randn(_ROWS // replicas, _LENGTH, 64)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(rows).square().sum() / _ROWS).backward()
    optimizer.step()


def _repeat(step: Callable[[], object], count: int) -> float:
    torch.distributed.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


def _nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this replica's parameters, gradients and optimizer state."""
    parameters = list(model.parameters())
    tensors: list[Any] = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
    tensors += [part for state in optimizer.state.values() for part in state.values() if part.dim()]
    return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in tensors)


def act_as_rank(contender: str) -> int:
    """Answer requests as a process: the seconds of one step, its bytes, or its resident memory."""
    contender, _, size = contender.partition(":")
    torch.set_num_threads(1)
    before = psutil.Process().memory_full_info().pss
    make = _with_fsdp if contender == "fsdp" else functools.partial(_with_distnb, contender)
    model, optimizer, steps = make(size, int(os.environ["WORLD_SIZE"]))

    def measure(name: str, count: int) -> float:
        seconds = steps(count) / count
        if name == "bytes":
            return float(_nbytes(model, optimizer))
        return float(psutil.Process().memory_full_info().pss - before) if name == "resident" else float(seconds)

    return serve(measure)


def _ranks(stack: contextlib.ExitStack, contender: str, size: str, replicas: int) -> Ranks:
    variables = {"MALLOC_MMAP_THRESHOLD_": "1000000"} if size == "large" else {}
    made = Ranks("benchmarks.sharded", f"{contender}:{size}", replicas, variables=variables)
    stack.callback(made.close)
    return made


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=7, steps=5, rank="")
    if given.rank:
        return act_as_rank(given.rank)
    met = True
    contenders = {"plain FSDP2": "fsdp", "sharded": "ShardedStrategy", "mirrored": "MirroredStrategy"}
    with contextlib.ExitStack() as stack:
        whole = _ranks(stack, "MirroredStrategy", "small", 1).step("bytes", 1)
    for replicas in (2, 4):
        with contextlib.ExitStack() as stack:
            ranks = {name: _ranks(stack, each, "small", replicas) for name, each in contenders.items()}
            measures = {name: functools.partial(each.step, "step", given.steps) for name, each in ranks.items()}
            timed = compare(measures, rounds=given.rounds, warmup=2)
            title = f"a training step, {replicas} replicas"
            met &= report(title, timed, baseline="plain FSDP2", targets=TARGETS["sharded"]["step"])
            nbytes = {name: (each.step("bytes", 1),) for name, each in ranks.items()} | {"one replica": (whole,)}
        title = f"parameters, gradients and AdamW's state, each of {replicas} replicas"
        met &= _report_memory(title, nbytes, "one replica", TARGETS["sharded"][f"state, {replicas}"])
        resident = {}
        for name, each in contenders.items():
            with contextlib.ExitStack() as stack:
                resident[name] = (_ranks(stack, each, "large", replicas).step("resident", 3),)
        title, targets = f"resident memory, each of {replicas} replicas", TARGETS["sharded"][f"resident, {replicas}"]
        met &= _report_memory(title, resident, "mirrored", targets)
    return 0 if met else 1


def _report_memory(title: str, found: Mapping[str, tuple[float, ...]], baseline: str, targets: list[Target]) -> bool:
    return report(title, Comparison(found), baseline=baseline, unit="MB", scale=1e-6, targets=targets)


if __name__ == "__main__":
    raise SystemExit(main())
