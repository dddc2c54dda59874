"""One rank of a contender of `benchmarks.training`: trains so many steps whenever it is told to."""

from __future__ import annotations

import os
import sys

import torch

from benchmarks.training_models import steps_alone, steps_with_ddp, steps_with_distnb

__all__: list[str] = []


def main() -> None:
    """Read lines `MODEL STEPS`, answer each with the seconds that one step took."""
    contender = sys.argv[1]
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if contender == "ddp":
        torch.distributed.init_process_group("gloo")
        make = steps_with_ddp
    elif contender == "alone":
        make = steps_alone
    else:
        import distnb

        distnb.MirroredStrategy()
        make = steps_with_distnb
    made = {}
    for line in sys.stdin:
        name, count = line.split()
        if name not in made:
            made[name] = make(name, rank, replicas)
        print(made[name](int(count)) / int(count), flush=True)


if __name__ == "__main__":
    main()
