"""One rank of a contender of `benchmarks.cross_device_ops`: reduces so often whenever it is told to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import distnb

__all__ = ["ALGORITHMS", "CASES", "OPTIONS"]

CASES = {"one small tensor": (1, 1_000), "one large tensor": (1, 4_000_000), "many small tensors": (200, 250)}
"""(how many tensors, elements of each, in float32)."""
ALGORITHMS = {
    "default": None,
    "HierarchicalCopyAllReduce": distnb.HierarchicalCopyAllReduce(),
    "ReductionToOneDevice": distnb.ReductionToOneDevice(),
    "tree, num_packs=0": distnb.HierarchicalCopyAllReduce(num_packs=0),
}
"""What `cross_device_ops` is, by name."""
_RING = distnb.CommunicationImplementation.RING
OPTIONS = {
    "RING": distnb.CommunicationOptions(implementation=_RING),
    "RING, bytes_per_pack=65536": distnb.CommunicationOptions(implementation=_RING, bytes_per_pack=65536),
}
"""What a call's `options` are, by name: the default algorithm by sockets alone, as between machines."""


def _tensors(case: str) -> list[torch.Tensor]:
    count, numel = CASES[case]
    return [torch.ones(numel) for _ in range(count)]


def with_gloo() -> Callable[[str, str, int], float]:
    """The peer: `dist.all_reduce`, tensor by tensor. Returns a function of (case, "", how often) to seconds."""
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
    """`all_reduce` of a replica context, of all tensors at once. Returns a function of (case, algorithm, how often)."""
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


def main() -> None:
    """Read lines `CASE/ALGORITHM COUNT`, answer each with the seconds that one reduction took."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    measure = with_gloo() if sys.argv[1] == "gloo" else with_distnb()
    for line in sys.stdin:
        what, _, count = line.rpartition(" ")
        case, _, algorithm = what.partition("/")
        print(measure(case, algorithm, int(count)) / int(count), flush=True)


if __name__ == "__main__":
    main()
