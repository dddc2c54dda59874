"""The time to connect to a detached cluster from a new notebook, next to the time to start one.

    python -m benchmarks.connecting [--rounds 5]

Every connection happens in a new process, which has loaded torch, as a notebook that continues a training has. The
clock runs until the names are bound. The cluster has 2 engines with a model of 10 million parameters, its Adam
optimizer, and 50 names of data.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.guard import TARGETS
from benchmarks.harness import Measure, compare, options, report

_NAME = "benchmark"

_PREPARE = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "distnb")
"""
_START = (
    _PREPARE
    + f"""
shell.run_cell("%distnb start -n 2 --detach --name {_NAME}").raise_error()
cell = '''%%distribute mirrored
import torch
with strategy.scope():
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(10)))
    optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 1000)).sum().backward()
optimizer.step()
for number in range(50):
    globals()[f"data_{{number}}"] = list(range(number))'''
shell.run_cell(cell).raise_error()
shell.run_cell("%distnb disconnect").raise_error()
"""
)
_MEASURED = (
    _PREPARE
    + """
import time, torch.distributed
began = time.perf_counter()
shell.run_cell("{command}").raise_error()
print("SECONDS", time.perf_counter() - began)
shell.run_cell("{afterwards}").raise_error()
"""
)


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=5)
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "XDG_STATE_HOME": state}
        _run(_START, environment)
        try:
            comparison = compare(
                {
                    "connect": _fresh(f"%distnb connect {_NAME}", "%distnb disconnect", environment),
                    "start": _fresh("%distnb start -n 2", "%distnb stop", environment),
                    "a second": lambda: 1.0,
                },
                rounds=given.rounds,
            )
        finally:
            subprocess.run([sys.executable, "-m", "distnb", "stop", _NAME], env=environment, check=True)
    kept = report(
        "connecting to engines that stayed",
        comparison,
        baseline="start",
        unit="s",
        scale=1.0,
        targets=TARGETS["connecting"]["time"],
    )
    return 0 if kept else 1


def _run(program: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"a program failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _fresh(command: str, afterwards: str, environment: dict[str, str]) -> Measure:
    """Return a measure of a magic in a process of its own."""

    def measure() -> float:
        shown = _run(_MEASURED.format(command=command, afterwards=afterwards), environment)
        return next(float(line.split()[1]) for line in shown.splitlines() if line.startswith("SECONDS "))

    return measure


if __name__ == "__main__":
    raise SystemExit(main())
