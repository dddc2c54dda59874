"""The start of engines on other machines over ssh: 1 and 8 on one host, 8 on two hosts, 32 on four.

    python -m benchmarks.startup_hosts [--rounds 3]

The hosts are network namespaces of this machine, each with an sshd (`tests.support.machines`); this needs root. Each
start happens in a new process, and the clock runs from before `%distnb start` until the sum of a first all-reduce is
back. All engines share this machine's cores, so what 8 engines compute at the start counts 8 times.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.guard import TARGETS
from benchmarks.harness import Measure, compare, options, report
from tests import conftest
from tests.support.machines import Machines, machines

_PROGRAM = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "distnb")
import torch
began = time.perf_counter()
shell.run_cell('%distnb start --hosts {hosts} --oversubscribe --ssh-args "{ssh}"').raise_error()
cell = '''%%distribute mirrored
import torch, torch.distributed as dist
x = torch.ones(10)
dist.all_reduce(x)
total = float(x.sum())'''
shell.run_cell(cell).raise_error()
assert shell.user_ns["total"] == 10 * {n}
print("SECONDS", time.perf_counter() - began)
shell.run_cell("%distnb stop").raise_error()
"""
_TITLE = "start over ssh to first all-reduce"
_ONE, _EIGHT, _TWO_HOSTS, _FOUR_HOSTS = "1 on a host", "8 on a host", "4 on each of 2 hosts", "8 on each of 4 hosts"
_HOSTS = ("red", "blue", "green", "gold")


def main() -> int:
    """Run the benchmark. Return 1 if the target is missed."""
    given = options(__doc__, rounds=3)
    try:
        with tempfile.TemporaryDirectory() as folder, machines(Path(folder), *_HOSTS) as network:
            measures = {
                _ONE: _start(network, "red:1", 1),
                _EIGHT: _start(network, "red:8", 8),
                _TWO_HOSTS: _start(network, "red:4,blue:4", 8),
                _FOUR_HOSTS: _start(network, ",".join(f"{host}:8" for host in _HOSTS), 32),
            }
            comparison = compare(measures, rounds=given.rounds)
    finally:
        conftest.remove_folders()
    targets = TARGETS["startup_hosts"]["time"]
    return 0 if report(_TITLE, comparison, baseline=_ONE, unit="s", scale=1.0, targets=targets) else 1


def _start(network: Machines, hosts: str, engines: int) -> Measure:
    """Return a measure that starts engines in a process of its own and reads the seconds that it prints."""
    program = _PROGRAM.format(hosts=hosts, ssh=" ".join(network.ssh_args), n=engines)

    def measure() -> float:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
        found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("SECONDS ")]
        if done.returncode != 0 or not found:
            raise RuntimeError(f"a start failed:\n{done.stdout}{done.stderr}")
        return float(found[0])

    return measure


if __name__ == "__main__":
    raise SystemExit(main())
