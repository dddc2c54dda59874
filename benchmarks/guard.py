"""The targets of all benchmarks in one table, and a run of all benchmarks that compares them with the table.

    python -m benchmarks.guard [NAME ...] [--whole]

The run takes about ten minutes, because each benchmark runs in its short form, with few rounds; with --whole they run
as they do alone. It prints every target, with what was measured. It fails if a benchmark fails, or if a ratio is worse
than both its target and the ratio that is known to miss it. Contenders that are not installed are left out.

A target changes only with the reason in the changelog.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks.harness import Target

__all__ = ["TARGETS"]


class _Benchmark(NamedTuple):
    """The short form of a benchmark, as arguments, and its targets by what it measures."""

    short: str
    targets: dict[str, list[Target]]


def _steps_of_ddp(at_most: float) -> list[Target]:
    return [Target(name, "DDP", at_most=at_most) for name in ("distnb script", "distnb cell")]


def _server_step() -> list[Target]:
    peers = {"TensorFlow": None, "torch rpc": 1.4, "torch rpc, one call a step": 2.2}
    return [Target("distnb", peer, at_most=1.0, known=each) for peer, each in peers.items()]


def _values(**known: tuple[float, float]) -> dict[str, list[Target]]:
    """Return the targets of values that are read again, and sent the first time, by the kind of value."""
    found = {}
    for kind, (unchanged, first) in known.items():
        found[f"{kind}, unchanged"] = [Target("unchanged", "floor", at_most=2.0, known=unchanged)]
        found[f"{kind}, first"] = [Target("first", "floor", at_most=3.0, known=first)]
    return found


_BENCHMARKS = {
    "roundtrip": _Benchmark(
        "--rounds 5 --calls 30",
        {
            "blocking": [
                Target("distnb strategy.run", "ipyparallel apply_sync", at_most=0.1, known=0.13),
                Target("distnb strategy.run", "bare ZMQ", at_most=2.2, known=2.4),
                Target("distnb strategy.run", "Ray actors", at_most=0.3, known=0.42),
                Target("distnb closures", "distnb strategy.run", at_most=1.5, known=2.0),
            ],
            "pipelined": [
                Target("distnb strategy.run", "Ray actors", at_most=0.4, known=0.85),
                Target("distnb closures", "distnb strategy.run", at_most=1.5, known=2.3),
            ],
        },
    ),
    "ordinary_loop": _Benchmark(
        "--rounds 3", {"step": [Target("ordinary cell", "%%distribute cell", at_most=1.3, known=1.8)]}
    ),
    "empty_cell": _Benchmark(
        "--rounds 5", {"cell": [Target("%%distribute mirrored", "%%px --block", at_most=0.35, known=0.46)]}
    ),
    "namespace": _Benchmark(
        "--rounds 3",
        _values(records=(3.8, 3.5), frame=(2.3, 5.0), tensors=(2.3, 3.5), array=(2.9, 0.0), small=(8.0, 8.0)),
    ),
    "transfer": _Benchmark(
        "--rounds 5",
        {
            "there": [
                Target("distnb: a cell reads it", "copy", at_most=3.0),
                Target("distnb: a cell reads it", "memcpy", at_most=3.0, known=13.0),
            ],
            "back": [
                Target("distnb: handle.numpy()", "copy", at_most=3.0),
                Target("distnb: handle.numpy()", "memcpy", at_most=3.0, known=6.0),
            ],
        },
    ),
    "checkpoints": _Benchmark(
        "--rounds 3",
        {
            "saved": [Target("distnb", "plain copy", at_most=1.43)],
            "loaded": [Target("distnb", "plain copy", at_most=1.43, known=2.3)],
        },
    ),
    "live_view": _Benchmark("--rounds 40", {"step": [Target("on", "off", at_most=1.01, known=1.03)]}),
    "live_curves": _Benchmark(
        "--seconds 10",
        {
            "rate": [Target("drawings", "a second", at_least=5.0, known=4.5)],
            "share": [Target("kernel", "a core", at_most=0.1, known=0.12)],
        },
    ),
    "training": _Benchmark(
        "--sets 1 --rounds 5",
        {"step": _steps_of_ddp(1.0), "step on two machines": _steps_of_ddp(1.1)},
    ),
    "one_replica": _Benchmark(
        "--rounds 20",
        {
            "step": [Target(name, "a microsecond", at_most=20.0) for name in ("default", "one_device", "mirrored")],
            "run": [Target("default", "a microsecond", at_most=3.0)],
        },
    ),
    "sharded": _Benchmark(
        "--rounds 3 --steps 3",
        {
            "step": [Target("sharded", "plain FSDP2", at_most=0.6)],
            "state, 2": [Target("sharded", "one replica", at_most=0.6)],
            "state, 4": [Target("sharded", "one replica", at_most=0.3)],
            "resident, 2": [Target("sharded", "mirrored", at_most=0.6, known=0.62)],
            "resident, 4": [Target("sharded", "mirrored", at_most=0.3, known=0.37)],
        },
    ),
    "central_storage": _Benchmark("--rounds 2 --steps 10", {"memory": [Target("central", "mirrored", at_most=1.0)]}),
    "cross_device_ops": _Benchmark("--rounds 2 --sets 1", {}),
    "keras_fit": _Benchmark(
        "--rounds 3 --epochs 3",
        {
            "epoch": [
                Target("distnb", "loop with DDP", at_most=1.05, known=1.5),
                Target("distnb, one replica", "Keras alone", at_most=1.03),
                Target("distnb", "Keras's DataParallel", at_most=0.5, known=0.7),
                Target("distnb", "TensorFlow's MirroredStrategy", at_most=1.0),
            ],
        },
    ),
    "parameter_servers": _Benchmark(
        "--rounds 3 --seconds 0.5 --workers 2",
        {
            "closures": [Target("distnb", peer, at_most=1.0) for peer in ("TensorFlow", "Ray tasks")],
            "mlp": _server_step(),
            "embedding": _server_step(),
        },
    ),
    "server_transport": _Benchmark(
        "--rounds 3",
        {
            "large": [Target("distnb", "ZMQ ipc", at_most=1.0)],
            "small": [Target("distnb", "ZMQ ipc", at_most=2.0, known=2.5)],
        },
    ),
    "transport": _Benchmark(  # our own transports stay only as long as they are so much faster
        "--rounds 3 --megabytes 32",
        {
            "small": [Target("ZMQ ipc", "UNIX socket", at_least=1.3)],
            "in flight": [Target("ZMQ ipc", "UNIX socket", at_least=0.9, known=0.7)],
            "large": [Target("ZMQ ipc, no copy", "shared memory", at_least=1.3)],
        },
    ),
    "startup": _Benchmark(
        "--rounds 1",
        {
            "time": [
                Target("distnb, 2", "ipyparallel, 2", at_most=1.0),
                Target("distnb, 8", "ipyparallel, 8", at_most=1.0),
                Target("distnb, 8", "distnb, 2", at_most=2.0),
            ],
            "memory": [Target("distnb, 8", "ipyparallel, 8", at_most=0.5)],
        },
    ),
    "startup_hosts": _Benchmark("--rounds 1", {"time": [Target("8 on a host", "1 on a host", at_most=1.5)]}),
    "connecting": _Benchmark(
        "--rounds 2",
        {"time": [Target("connect", "a second", at_most=1.0), Target("connect", "start", at_most=1.0)]},
    ),
    "resize": _Benchmark("--rounds 1", {"time": [Target("resize", "start and copy", at_most=0.5)]}),
    "ray_start": _Benchmark("--rounds 1", {"time": [Target("distnb", "Ray Train", at_most=1.0)]}),
    "scale": _Benchmark(
        "--replicas 4,64 --rounds 3 --seconds 2",
        {"cell": [Target("a further replica", "a millisecond", at_most=1.0)]},
    ),
}

TARGETS = {name: benchmark.targets for name, benchmark in _BENCHMARKS.items()}
"""The targets of each benchmark, by what it measures."""

# A benchmark ends with status 1 if a target is missed, and so does Python after an error.
_RUN = """
import runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except SystemExit as end:
    sys.exit(end.code not in (0, 1))
"""


def main() -> int:
    """Run the benchmarks. Return 1 if one failed, or if a ratio became worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.names) - _BENCHMARKS.keys():
        parser.error(f"no such benchmark: {', '.join(unknown)}. Choose from {', '.join(_BENCHMARKS)}.")
    summary, failed = [], []
    for name in given.names or _BENCHMARKS:
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        arguments = [] if given.whole else _BENCHMARKS[name].short.split()
        command = [sys.executable, "-c", _RUN, f"benchmarks.{name}", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.strip().partition(":")[0] in ("met", "MISSED", "LOST", "absent"):
                    summary.append(f"{name:>17}  {line.rstrip()}")
                    failed += [name] * line.strip().startswith("LOST")
        if process.returncode:
            failed.append(name)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    print("\nAll targets\n" + "\n".join(summary))
    if failed:
        print(f"Figures were lost, or runs failed, in: {', '.join(dict.fromkeys(failed))}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
