"""One rank of a contender of `benchmarks.across_hosts`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.training_models import steps_with_ddp, steps_with_distnb

__all__: list[str] = []

_NBYTES = 273 * 1024


def _all_reduces(count: int) -> float:
    tensor = torch.ones(_NBYTES // 4)
    torch.distributed.barrier()
    began = time.perf_counter()
    for _ in range(count):
        torch.distributed.all_reduce(tensor)
    return time.perf_counter() - began


def main() -> None:
    """Read lines `WHAT STEPS`, answer each with the seconds that one step took."""
    contender = sys.argv[1]
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if contender == "ddp":
        torch.distributed.init_process_group("gloo")
        make = steps_with_ddp
    else:
        import distnb

        distnb.MirroredStrategy()
        make = steps_with_distnb
    made: dict[str, Callable[[int], float]] = {"all_reduce": _all_reduces}
    for line in sys.stdin:
        name, count = line.split()
        if name not in made:
            made[name] = make(name, rank, replicas)
        print(made[name](int(count)) / int(count), flush=True)


if __name__ == "__main__":
    main()
