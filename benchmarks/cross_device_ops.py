"""The algorithms of `cross_device_ops`, on small and large tensors, against plain `dist.all_reduce` over Gloo.

    python -m benchmarks.cross_device_ops [--replicas 2] [--rounds 7] [--sets 2]

What distnb's `all_reduce` does with each algorithm, and where a call is told to take sockets alone (RING), on CPU
replicas of one machine: one small tensor, one large one, and many small ones, which become one message (except under
the tree with `num_packs=0`). The peer reduces them one by one, as a program without packing does. There is no target:
the algorithms are for different circumstances.
"""

from __future__ import annotations

import argparse
import contextlib
import functools

from benchmarks.cross_device_worker import ALGORITHMS, CASES, OPTIONS
from benchmarks.harness import Comparison, compare, report
from benchmarks.training import Ranks

_PEER = "dist.all_reduce (Gloo)"
_OFTEN = {"one small tensor": 100, "one large tensor": 5, "many small tensors": 5}
_WORKER = "benchmarks.cross_device_worker"


def main() -> int:
    """Run it. Always returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="rounds per set")
    parser.add_argument("--sets", type=int, default=2, help="how often all processes are started anew")
    options = parser.parse_args()

    values: dict[str, dict[str, tuple[float, ...]]] = {case: {} for case in CASES}
    for _ in range(options.sets):
        with contextlib.ExitStack() as stack:
            gloo, ours = (Ranks(name, _WORKER, options.replicas) for name in ("gloo", "distnb"))
            stack.callback(gloo.close)
            stack.callback(ours.close)
            for case in CASES:
                measures = {_PEER: functools.partial(gloo.step, f"{case}/", _OFTEN[case])}
                for name in (*ALGORITHMS, *OPTIONS):
                    measures[name] = functools.partial(ours.step, f"{case}/{name}", _OFTEN[case])
                for name, kept in compare(measures, rounds=options.rounds, warmup=2).values.items():
                    values[case][name] = values[case].get(name, ()) + kept
    for case, kept_values in values.items():
        report(f"{case}, {options.replicas} replicas", Comparison(kept_values), baseline=_PEER)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
