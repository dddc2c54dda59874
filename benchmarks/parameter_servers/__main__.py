"""Closures and asynchronous steps per second, against TensorFlow's coordinator, torch.distributed.rpc and Ray.

    python -m benchmarks.parameter_servers [--rounds 5] [--seconds 1.5] [--only mlp] [--workers 2] [--without NAME,NAME]

"closures": an empty closure, scheduled many times and joined, 2 workers. "mlp": 784-128-64-10, batches of 64, SGD.
"embedding": the sum of 20 rows per example of a table of 100,000 × 64, and a linear layer; Adagrad, sparse gradients.
Each runs with 2 workers and 1 or 2 servers, all in processes of their own with one computing thread; then with 1 to 4
workers and 1 server. A figure is wall time divided by the steps of all workers together.

The peers: TensorFlow's ParameterServerStrategy (in `.venv/tensorflow`), Ray's tasks, and parameter servers written on
torch.distributed.rpc, with a pull and a push per step, or with one call for both. A peer that is missing is left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.guard import TARGETS
from benchmarks.harness import compare, options, report
from benchmarks.parameter_servers.work import Cluster
from benchmarks.ranks import Ranks, serve

_DISTNB, _TENSORFLOW, _RAY = "distnb", "TensorFlow", "Ray tasks"
_RPC, _FUSED_RPC = "torch rpc", "torch rpc, one call a step"
_MODULES = {
    _DISTNB: "with_distnb:connect",
    _TENSORFLOW: "with_tensorflow:connect",
    _RAY: "with_ray:connect",
    _RPC: "with_rpc:connect",
    _FUSED_RPC: "with_rpc:connect_fused",
}
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
_TENSORFLOW_PYTHON = Path(".venv/tensorflow/bin/python")
_WORK = {
    "closures": (_DISTNB, _TENSORFLOW, _RAY),
    "mlp": (_DISTNB, _TENSORFLOW, _RPC, _FUSED_RPC),
    "embedding": (_DISTNB, _TENSORFLOW, _RPC, _FUSED_RPC),
}


def act_as_rank(rank: str) -> int:
    """Answer requests as the coordinator of a contender, "NAME/WORKERS/SERVERS", with the seconds of one step."""
    contender, workers, servers = rank.split("/")
    module, _, connect = _MODULES[contender].partition(":")
    loaded = importlib.import_module(f"benchmarks.parameter_servers.{module}")
    with contextlib.redirect_stdout(sys.stderr):  # stdout itself is for answers
        prepare = getattr(loaded, connect)(Cluster(int(workers), int(servers)))
    known: dict[str, Callable[[int], object]] = {}

    def measure(work: str, count: int) -> float:
        if work not in known:
            known[work] = prepare(work)
        start = time.perf_counter()
        known[work](count)
        return (time.perf_counter() - start) / count

    return serve(measure)


def _started(stack: contextlib.ExitStack, names: Sequence[str], cluster: Cluster) -> dict[str, Ranks]:
    """Start the coordinators of the available contenders."""
    found = {}
    for name in names:
        if name == _TENSORFLOW and not _TENSORFLOW_PYTHON.exists():
            print(f"{name} is left out: there is no {_TENSORFLOW_PYTHON} (make .venv/.made-tensorflow).")
        elif name == _RAY and importlib.util.find_spec("ray") is None:
            print(f"{name} are left out: Ray is not installed (make .venv/.made-bench).")
        else:
            python = str(_TENSORFLOW_PYTHON) if name == _TENSORFLOW else sys.executable
            rank = f"{name}/{cluster.workers}/{cluster.servers}"
            found[name] = Ranks("benchmarks.parameter_servers", rank, 1, python=python, variables=_QUIET)
            stack.callback(found[name].close)
    return found


def _measure(work: str, cluster: Cluster, names: Sequence[str], rounds: int, seconds: float) -> bool:
    """Print the times of one kind of work in one cluster. Return whether distnb is ahead of all peers."""
    with contextlib.ExitStack() as stack:
        measures = {}
        for name, ranks in _started(stack, names, cluster).items():
            ranks.step(work, 20 * cluster.workers)  # the first steps build and trace
            count = max(2 * cluster.workers, int(seconds / ranks.step(work, 20 * cluster.workers)))
            measures[name] = functools.partial(ranks.step, work, count)
        steps = compare(measures, rounds=rounds)
    title = f"{work}, {cluster.workers} workers, {cluster.servers} servers"
    baseline = _DISTNB if _DISTNB in measures else next(iter(measures))
    met = report(title, steps, baseline=baseline, targets=TARGETS["parameter_servers"][work])
    print("  a second: " + ", ".join(f"{name} {1 / steps.median(name):,.0f}" for name in measures), flush=True)
    return met


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=5, seconds=1.5, only="", workers="", without="", rank="")
    if given.rank:
        return act_as_rank(given.rank)
    clusters = [("closures", Cluster(2, 1))]
    clusters += [(model, Cluster(2, servers)) for model in ("mlp", "embedding") for servers in (1, 2)]
    clusters += [(work, Cluster(workers, 1)) for work in _WORK for workers in (1, 3, 4)]
    kept = True
    for work, cluster in clusters:
        if work in (given.only or work) and str(cluster.workers) in (given.workers or str(cluster.workers)):
            names = [name for name in _WORK[work] if name not in given.without.split(",")]
            kept &= _measure(work, cluster, names, given.rounds, given.seconds)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
