"""The algorithms of `cross_device_ops`, on small and large tensors, against plain `dist.all_reduce` over Gloo.

    python -m benchmarks.cross_device_ops [--replicas 2] [--rounds 7] [--sets 2]

The time of distnb's `all_reduce` with each algorithm, and with a call's option to use sockets only (RING), on CPU
replicas of one machine: one small tensor, one large one, and many small ones, which become one message (except under
the tree with `num_packs=0`). The peer reduces them one by one, like a program without packing. There is no target,
because the algorithms are for different circumstances.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

import distnb
from benchmarks.harness import Comparison, compare, options, report
from benchmarks.ranks import Ranks, serve

_PEER = "dist.all_reduce (Gloo)"
_OFTEN = {"one small tensor": 100, "one large tensor": 5, "many small tensors": 5}
CASES = {"one small tensor": (1, 1_000), "one large tensor": (1, 4_000_000), "many small tensors": (200, 250)}
"""The cases by name: (number of tensors, elements of each, in float32)."""
ALGORITHMS = {
    "default": None,
    "HierarchicalCopyAllReduce": distnb.HierarchicalCopyAllReduce(),
    "ReductionToOneDevice": distnb.ReductionToOneDevice(),
    "tree, num_packs=0": distnb.HierarchicalCopyAllReduce(num_packs=0),
}
"""The values of `cross_device_ops` by name."""
_RING = distnb.CommunicationImplementation.RING
OPTIONS = {
    "RING": distnb.CommunicationOptions(implementation=_RING),
    "RING, bytes_per_pack=65536": distnb.CommunicationOptions(implementation=_RING, bytes_per_pack=65536),
}
"""The `options` of a call by name: the default algorithm by sockets only, as between machines."""


def _tensors(case: str) -> list[torch.Tensor]:
    count, numel = CASES[case]
    return [torch.ones(numel) for _ in range(count)]


def with_gloo() -> Callable[[str, str, int], float]:
    """Return a function of (case, "", count) that gives the peer's seconds: `dist.all_reduce`, tensor by tensor."""
    torch.distributed.init_process_group("gloo")

    def measure(case: str, algorithm: str, count: int) -> float:
        tensors = _tensors(case)
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(count):
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)
        return time.perf_counter() - began

    return measure


def with_distnb() -> Callable[[str, str, int], float]:
    """Return a function of (case, algorithm, count) that gives the seconds of `all_reduce` in a replica context."""
    strategies = {name: distnb.MirroredStrategy(cross_device_ops=ops) for name, ops in ALGORITHMS.items()}
    strategies |= dict.fromkeys(OPTIONS, strategies["default"])

    def measure(case: str, algorithm: str, count: int) -> float:
        tensors: Any = _tensors(case)

        def reduce() -> torch.Tensor:
            context = distnb.get_replica_context()
            assert context is not None
            torch.distributed.barrier()
            began = time.perf_counter()
            for _ in range(count):
                context.all_reduce("sum", tensors, options=OPTIONS.get(algorithm))
            return torch.tensor(time.perf_counter() - began)

        strategy = strategies[algorithm]
        return float(strategy.local_results(strategy.run(reduce))[0])

    return measure


def act_as_rank(contender: str) -> int:
    """Answer requests as a process of a contender."""
    torch.set_num_threads(1)
    measure = with_gloo() if contender == "gloo" else with_distnb()

    def one(what: str, count: int) -> float:
        case, _, algorithm = what.partition("/")
        return measure(case, algorithm, count) / count

    return serve(one)


def main() -> int:
    """Run the benchmark. Always return 0."""
    given = options(__doc__, replicas=2, rounds=7, sets=2, rank="")
    if given.rank:
        return act_as_rank(given.rank)

    values: dict[str, dict[str, tuple[float, ...]]] = {case: {} for case in CASES}
    for _ in range(given.sets):
        with contextlib.ExitStack() as stack:
            gloo, ours = (Ranks("benchmarks.cross_device_ops", name, given.replicas) for name in ("gloo", "distnb"))
            stack.callback(gloo.close)
            stack.callback(ours.close)
            for case in CASES:
                measures = {_PEER: functools.partial(gloo.step, f"{case}/", _OFTEN[case])}
                for name in (*ALGORITHMS, *OPTIONS):
                    measures[name] = functools.partial(ours.step, f"{case}/{name}", _OFTEN[case])
                for name, kept in compare(measures, rounds=given.rounds, warmup=2).values.items():
                    values[case][name] = values[case].get(name, ()) + kept
    for case, kept_values in values.items():
        report(f"{case}, {given.replicas} replicas", Comparison(kept_values), baseline=_PEER)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
