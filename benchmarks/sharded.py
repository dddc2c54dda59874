"""A sharded model against plain FSDP2 and against mirrored variables: the time of a training step, and memory.

    python -m benchmarks.sharded [--rounds 7] [--steps 5]

A transformer of six blocks (19 MB of parameters) with AdamW, one thread per replica, on the CPU. The peer shards the
same blocks by torch's `fully_shard`, in torchrun's environment. Memory is counted twice: the bytes of this replica's
parameters, gradients and optimizer state, and what the first training adds to the resident memory of a process.

Targets: a step takes at most 1.05 times as long as with plain FSDP2. With n replicas, parameters, gradients and
optimizer state take at most 1.2/n of their bytes on one replica.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import nn

import distnb
from benchmarks.harness import Comparison, Target, compare, options, report
from benchmarks.ranks import Ranks, serve

_ROWS, _LENGTH, _WIDTH = 8, 32, 256


def _make_model() -> nn.Module:
    block = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(64, _WIDTH), nn.TransformerEncoder(block, 6), nn.Linear(_WIDTH, 10))


def _with_fsdp(rank: int, replicas: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], float]]:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = _make_model()
    for block in model.get_submodule("1.layers").children():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, functools.partial(_repeat, functools.partial(_step, model, optimizer, _batch(replicas)))


def _with_distnb(
    name: str, rank: int, replicas: int
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], float]]:
    strategy: Any = getattr(distnb, name)(check_mean_loss=False)
    torch.manual_seed(0)
    with strategy.scope():
        model = _make_model()
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
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    before = psutil.Process().memory_full_info().uss
    make = _with_fsdp if contender == "fsdp" else functools.partial(_with_distnb, contender)
    model, optimizer, steps = make(rank, replicas)

    def measure(name: str, count: int) -> float:
        seconds = steps(count) / count
        optimizer.zero_grad(set_to_none=False)
        if name == "bytes":
            steps(1)
            return float(_nbytes(model, optimizer))
        return float(psutil.Process().memory_full_info().uss - before) if name == "resident" else float(seconds)

    return serve(measure)


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=7, steps=5, rank="")
    if given.rank:
        return act_as_rank(given.rank)
    met = True
    contenders = {"plain FSDP2": "fsdp", "sharded": "ShardedStrategy", "mirrored": "MirroredStrategy"}
    with contextlib.ExitStack() as stack:
        one = Ranks("benchmarks.sharded", "MirroredStrategy", 1)
        stack.callback(one.close)
        whole = one.step("bytes", 1)
        for replicas in (2, 4):
            with contextlib.ExitStack() as inner:
                ranks = {name: Ranks("benchmarks.sharded", each, replicas) for name, each in contenders.items()}
                for each in ranks.values():
                    inner.callback(each.close)
                measures = {name: functools.partial(each.step, "step", given.steps) for name, each in ranks.items()}
                timed = compare(measures, rounds=given.rounds, warmup=2)
                target = Target("sharded", "plain FSDP2", at_most=1.05)
                met &= report(f"a training step, {replicas} replicas", timed, baseline="plain FSDP2", targets=[target])
                for what in ("bytes", "resident"):
                    found = {name: (each.step(what, 1),) for name, each in ranks.items()}
                    targets = [Target("sharded", "one replica", at_most=1.2 / replicas)] if what == "bytes" else []
                    if what == "bytes":
                        found["one replica"] = (whole,)
                    title = {"bytes": "parameters, gradients and AdamW's state", "resident": "resident memory"}[what]
                    met &= report(
                        f"{title}, each of {replicas} replicas",
                        Comparison(found),
                        baseline="one replica" if what == "bytes" else "mirrored",
                        unit="MB",
                        scale=1e-6,
                        targets=targets,
                    )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
