"""Central storage against mirrored variables: the time of a training step, and memory. 2 replicas on the CPU.

    python -m benchmarks.central_storage [--rounds 7] [--steps 20]

Steps with Adam, one thread per replica. Memory is what the first training of a model of 34 MB of parameters adds to
the replicas' proportional set sizes (pages that several share count once): parameters, gradients, Adam's two moments.
There is no target for time. Central storage must take less memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import psutil
import torch

import distnb
from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, compare, options, report
from benchmarks.ranks import REPLICAS, Ranks, serve
from benchmarks.training_models import MODELS, steps_with_distnb

_CONTENDERS = {"mirrored": "MirroredStrategy", "central": "CentralStorageStrategy"}


def act_as_rank(contender: str) -> int:
    """Answer requests as a process of a strategy: the seconds of one step of a model, or all replicas' bytes."""
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    strategy: Any = getattr(distnb, contender)()
    made: dict[str, Any] = {}

    def measure(name: str, count: int) -> float:
        model = "wide" if name == "memory" else name
        before = _memory()
        if model not in made:
            made[model] = steps_with_distnb(model, rank, replicas, strategy=strategy, optimizer_class=torch.optim.Adam)
        seconds = made[model](count) / count
        if name != "memory":
            return float(seconds)
        torch.distributed.barrier()  # all replicas hold their memory, which they may share
        total = torch.tensor(_memory() - before)
        torch.distributed.all_reduce(total)
        return float(total.item())

    return serve(measure)


def _memory() -> int:
    return int(psutil.Process().memory_full_info().pss)


def main() -> int:
    """Run the benchmark. Return 1 if central storage takes more memory."""
    given = options(__doc__, rounds=7, steps=20, rank="")
    if given.rank:
        return act_as_rank(given.rank)

    with contextlib.ExitStack() as stack:
        ranks = {name: Ranks("benchmarks.central_storage", strategy) for name, strategy in _CONTENDERS.items()}
        for each in ranks.values():
            stack.callback(each.close)
        for model in MODELS:
            measures = {name: functools.partial(each.step, model, given.steps) for name, each in ranks.items()}
            timed = compare(measures, rounds=given.rounds, warmup=2)
            report(f"a training step with Adam, {model}", timed, baseline="mirrored")
        memory = Comparison({name: (each.step("memory", 3),) for name, each in ranks.items()})
    title = f"memory that training a model of 34 MB takes, {REPLICAS} replicas together"
    targets = TARGETS["central_storage"]["memory"]
    met = report(title, memory, baseline="mirrored", unit="MB", scale=1e-6, targets=targets)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
