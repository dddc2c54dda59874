"""The time to resize a cluster from 2 to 4 engines, against the start of two engines plus one copy of the state.

    python -m benchmarks.resize [--rounds 5] [--megabytes 120]

Each measurement happens in a new process that has loaded torch. The state is a model with its Adam optimizer. A resize
ends when the new replicas have the state. The peer is `distnb.start(2)`, plus a broadcast of the same tensors from
replica 0 to replica 1 over the process group.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.guard import TARGETS
from benchmarks.harness import Measure, compare, options, report

_MADE = """
import sys, time
import torch
import distnb
from distnb.notebook import compose
torch.set_num_threads(1)
names = sys.modules["__main__"].__dict__
def cell(source):
    compose.require().cells.run(source, distnb.MirroredStrategy().spec, filename="cell")
def make():
    cell('''
import torch
from distnb import get_strategy
side = int(({megabytes} * 1e6 / 12) ** 0.5)
with strategy.scope():
    model = torch.nn.Linear(side, side, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
def step():
    model(torch.ones(1, side)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
strategy.run(step)
''')
"""

_RESIZE = (
    _MADE
    + """
distnb.start(2)
names["strategy"] = distnb.MirroredStrategy()
make()
began = time.perf_counter()
compose.require().resize(4)
print("SECONDS", time.perf_counter() - began)
cell("strategy.run(step)\\nstrategy.assert_in_sync([model, optimizer])")
distnb.stop()
"""
)

_START_AND_COPY = (
    _MADE
    + """
began = time.perf_counter()
distnb.start(2)
seconds = time.perf_counter() - began
names["strategy"] = distnb.MirroredStrategy()
make()
cell('''
import time
import torch.distributed as dist
dist.barrier()
began = time.perf_counter()
for tensor in (model.weight.data, *(each for each in optimizer.state[model.weight].values())):
    dist.broadcast(tensor, 0)
copying = time.perf_counter() - began
''')
print("SECONDS", seconds + max(distnb.MirroredStrategy().local_results(names["copying"])))
distnb.stop()
"""
)


def main() -> int:
    """Run the benchmark. Return 1 if the target is missed."""
    given = options(__doc__, rounds=5, megabytes=120)
    measures = {
        name: _fresh_process(program.replace("{megabytes}", str(given.megabytes)))
        for name, program in {"start and copy": _START_AND_COPY, "resize": _RESIZE}.items()
    }
    kept = report(
        f"2 to 4 engines, with {given.megabytes} MB of state",
        compare(measures, rounds=given.rounds),
        baseline="start and copy",
        unit="s",
        scale=1.0,
        targets=TARGETS["resize"]["time"],
    )
    return 0 if kept else 1


def _fresh_process(program: str) -> Measure:
    """Return a measure that runs a program in a process of its own and reads the seconds that it prints."""

    def measure() -> float:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
        figures = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("SECONDS ")]
        if done.returncode != 0 or not figures:
            raise RuntimeError(f"a measurement failed:\n{done.stdout}{done.stderr}")
        return float(figures[0])

    return measure


if __name__ == "__main__":
    raise SystemExit(main())
