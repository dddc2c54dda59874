"""Central storage against mirrored variables: the time of a training step, and memory. 2 replicas on the CPU.

    python -m benchmarks.central_storage [--rounds 7] [--steps 20]

Steps with Adam, one thread per replica. Memory is what the first training of a model of 34 MB of parameters adds to
the replicas' proportional set sizes (pages that several share count once): parameters, gradients, Adam's two moments.
There is no target for time; of memory central storage is to take less.
"""

from __future__ import annotations

import argparse
import contextlib
import functools

from benchmarks.harness import Comparison, Target, compare, report
from benchmarks.training import REPLICAS, Ranks
from benchmarks.training_models import MODELS

_WORKER = "benchmarks.central_storage_worker"
_CONTENDERS = {"mirrored": "MirroredStrategy", "central": "CentralStorageStrategy"}


def main() -> int:
    """Run it. Returns 1 when central storage takes more memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    with contextlib.ExitStack() as stack:
        ranks = {name: Ranks(strategy, _WORKER) for name, strategy in _CONTENDERS.items()}
        for each in ranks.values():
            stack.callback(each.close)
        for model in MODELS:
            measures = {name: functools.partial(each.step, model, options.steps) for name, each in ranks.items()}
            timed = compare(measures, rounds=options.rounds, warmup=2)
            report(f"a training step with Adam, {model}", timed, baseline="mirrored")
        memory = Comparison({name: (each.step("memory", 3),) for name, each in ranks.items()})
    less = Target("central", "mirrored", at_most=1.0)
    title = f"memory that training a model of 34 MB takes, {REPLICAS} replicas together"
    met = report(title, memory, baseline="mirrored", unit="MB", scale=1e-6, targets=[less])
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
