"""The time to the first all-reduce on 2 and on 8 engines: distnb, ipyparallel, and processes under torchrun.

    python -m benchmarks.startup [--rounds 5]

Every start happens in a new process. The clock runs from before the first import of distnb or ipyparallel until the
reduced tensor's sum is back in the notebook. ipyparallel's engines then still have to import torch and to form the
group, ours come with both. Then memory is read per engine, as the kernel's "proportional set size": memory that several
processes share counts in equal parts.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, Measure, compare, options, report

_FEW, _MANY = 2, 8

_MEMORY = """
import psutil
def tell_memory(pids):
    print("BYTES", sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / len(pids))
"""

_DISTNB = (
    _MEMORY
    + """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.perf_counter()
shell.run_line_magic("load_ext", "distnb")
shell.run_cell("%distnb start -n {n}").raise_error()
cell = '''%%distribute mirrored
import torch, torch.distributed as dist
x = torch.ones(10)
dist.all_reduce(x)
total = float(x.sum())'''
shell.run_cell(cell).raise_error()
assert shell.user_ns["total"] == 10 * {n}
print("SECONDS", time.perf_counter() - began)
from distnb.notebook import compose
tell_memory([row.pid for row in compose.require().status()])
shell.run_cell("%distnb stop").raise_error()
"""
)

_IPYPARALLEL = (
    _MEMORY
    + """
import os, socket, time
def first(port, size):
    import torch, torch.distributed as dist
    store = f"tcp://127.0.0.1:{{port}}"
    dist.init_process_group("gloo", init_method=store, rank=engine, world_size=size)
    x = torch.ones(10)
    dist.all_reduce(x)
    return float(x.sum())
began = time.perf_counter()
import ipyparallel
cluster = ipyparallel.Cluster(n={n}, log_level=40)
client = cluster.start_and_connect_sync()
client[:].scatter("engine", range({n}), flatten=True, block=True)
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
assert client[:].apply_sync(first, port, {n}) == [10.0 * {n}] * {n}
print("SECONDS", time.perf_counter() - began)
tell_memory(client[:].apply_sync(os.getpid))
client.close()
cluster.stop_cluster_sync()
"""
)

_TORCHRUN = """
import os, subprocess, sys, tempfile, time
script = '''
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(10)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("TOTAL", float(x.sum()), flush=True)
'''
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "script.py")
    with open(path, "w") as file:
        file.write(script)
    began = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node={n}", "--standalone", path]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert run.stdout.readline().split() == ["TOTAL", str(10.0 * {n})]
    print("SECONDS", time.perf_counter() - began)
    run.wait()
"""


_PROGRAMS = {"distnb": _DISTNB, "ipyparallel": _IPYPARALLEL, "torchrun": _TORCHRUN}


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=5)

    memory: dict[str, list[float]] = defaultdict(list)
    measures = {
        _named(name, engines): _fresh_process(program, engines, memory[_named(name, engines)])
        for engines in (_FEW, _MANY)
        for name, program in _PROGRAMS.items()
    }
    comparison = compare(measures, rounds=given.rounds)
    peer = _named("ipyparallel", _FEW)
    kept = report(
        "start to first all-reduce",
        comparison,
        baseline=peer,
        unit="s",
        scale=1.0,
        targets=TARGETS["startup"]["time"],
    )
    # The first round is the warm-up.
    used = Comparison({name: tuple(values[-given.rounds :]) for name, values in memory.items() if values})
    kept &= report(
        "memory of an engine after it",
        used,
        baseline=peer,
        unit="MB",
        scale=1e-6,
        targets=TARGETS["startup"]["memory"],
    )
    return 0 if kept else 1


def _named(name: str, engines: int) -> str:
    return f"{name}, {engines}"


def _fresh_process(program: str, engines: int, memory: list[float]) -> Measure:
    """Return a measure that runs a program in a process of its own and reads the seconds that it prints.

    Args:
        memory: A list to which the memory that the program reports for its engines is added, if any.
    """

    def measure() -> float:
        done = subprocess.run(
            [sys.executable, "-c", program.format(n=engines)], capture_output=True, text=True, timeout=180
        )
        figures = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("SECONDS ", "BYTES ")))
        if done.returncode != 0 or "SECONDS" not in figures:
            raise RuntimeError(f"a start failed:\n{done.stdout}{done.stderr}")
        if "BYTES" in figures:
            memory.append(float(figures["BYTES"]))
        return float(figures["SECONDS"])

    return measure


if __name__ == "__main__":
    raise SystemExit(main())
