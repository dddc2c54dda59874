"""From nothing to the first all-reduce on 2 engines: distnb, ipyparallel, and bare processes under torchrun.

    python -m benchmarks.startup [--rounds 5]

Every start happens in a fresh process. The clock runs from before the first import of distnb or ipyparallel until the
reduced tensor's sum is back in the notebook; ipyparallel's engines then still have to import torch and to form the
group, ours come with both. The target of the project: no slower than ipyparallel.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.harness import Measure, Target, compare, report

_ENGINES = 2

_DISTNB = """
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
shell.run_cell("%distnb stop").raise_error()
"""

_IPYPARALLEL = """
import socket, time
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
client.close()
cluster.stop_cluster_sync()
"""

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


def main() -> int:
    """Run it. Returns 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    comparison = compare(
        {
            "distnb": _fresh_process(_DISTNB),
            "ipyparallel": _fresh_process(_IPYPARALLEL),
            "torchrun": _fresh_process(_TORCHRUN),
        },
        rounds=options.rounds,
    )
    target = Target("distnb", "ipyparallel", at_most=1.0)
    title = f"start to first all-reduce, {_ENGINES} engines"
    kept = report(title, comparison, baseline="ipyparallel", unit="s", scale=1.0, targets=[target])
    return 0 if kept else 1


def _fresh_process(program: str) -> Measure:
    """A measure that runs a program in a process of its own and reads the seconds that it prints."""

    def measure() -> float:
        done = subprocess.run(
            [sys.executable, "-c", program.format(n=_ENGINES)], capture_output=True, text=True, timeout=120
        )
        seconds = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("SECONDS")]
        if done.returncode != 0 or not seconds:
            raise RuntimeError(f"a start failed:\n{done.stdout}{done.stderr}")
        return float(seconds[0])

    return measure


if __name__ == "__main__":
    raise SystemExit(main())
