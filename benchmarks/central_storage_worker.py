"""One rank of a contender of `benchmarks.central_storage`: trains so many steps whenever it is told to."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil
import torch

import distnb
from benchmarks.training_models import steps_with_distnb

__all__: list[str] = []


def main() -> None:
    """Read lines `MODEL STEPS`, answer each with the seconds of one step; `memory STEPS` with all replicas' bytes.

    The argument is a strategy's name.
    """
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    strategy: Any = getattr(distnb, sys.argv[1])()
    made: dict[str, Any] = {}
    for line in sys.stdin:
        name, count = line.split()
        model = "wide" if name == "memory" else name
        before = _memory()
        if model not in made:
            made[model] = steps_with_distnb(model, rank, replicas, strategy=strategy, optimizer_class=torch.optim.Adam)
        seconds = made[model](int(count)) / int(count)
        if name == "memory":
            torch.distributed.barrier()  # all have theirs, which they may share
            total = torch.tensor(_memory() - before)
            torch.distributed.all_reduce(total)
            print(total.item(), flush=True)
        else:
            print(seconds, flush=True)


def _memory() -> int:
    return int(psutil.Process().memory_full_info().pss)


if __name__ == "__main__":
    main()
