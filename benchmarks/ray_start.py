"""The time to the first all-reduce on 2 processes of a Ray cluster: distnb's engines, and Ray Train's workers.

    python -m benchmarks.ray_start [--rounds 5]

One local Ray cluster runs during the whole benchmark. Every start happens in a new process. The clock runs from before
the first import until the reduced tensor's sum is known: in the notebook for distnb, and in the first worker for Ray
Train's TorchTrainer. Then everything is ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.guard import TARGETS
from benchmarks.harness import Measure, compare, options, report

_CPUS = 4
_DISTNB, _RAY_TRAIN = "distnb", "Ray Train"

_PROGRAMS = {
    _DISTNB: """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.time()
shell.run_line_magic("load_ext", "distnb")
shell.run_cell("import distnb\\ndistnb.start(2, on=distnb.Ray())").raise_error()
cell = '''%%distribute mirrored
import torch, torch.distributed as dist
x = torch.ones(10)
dist.all_reduce(x)
total = float(x.sum())'''
shell.run_cell(cell).raise_error()
print("RESULT", shell.user_ns["total"], time.time() - began)
shell.run_cell("%distnb stop").raise_error()
""",
    _RAY_TRAIN: """
import pathlib, tempfile, time
began = time.time()
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def first(config):
    import time, torch, torch.distributed as dist
    x = torch.ones(10)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        config["result"].write_text(f"{float(x.sum())} {time.time()}")

ray.init(log_to_driver=False, logging_level="error")
with tempfile.TemporaryDirectory() as folder:
    result = pathlib.Path(folder, "result")
    TorchTrainer(
        first,
        train_loop_config={"result": result},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    total, done = result.read_text().split()
print("RESULT", total, float(done) - began)
""",
}


def main() -> int:
    """Run the benchmark. Return 1 if the target is missed."""
    given = options(__doc__, rounds=5)
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r") as folder:
        # The packages of Ray Train are next to the installed ones (see the Makefile). Ray's processes inherit this.
        paths = [str(Path(sys.prefix) / "ray-train"), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": _CPUS, "include_dashboard": False})
        os.environ["RAY_ADDRESS"] = cluster.address
        try:
            comparison = compare({name: _fresh_process(text) for name, text in _PROGRAMS.items()}, rounds=given.rounds)
        finally:
            cluster.shutdown()
    kept = report(
        "start on a Ray cluster to first all-reduce",
        comparison,
        baseline=_DISTNB,
        unit="s",
        scale=1.0,
        targets=TARGETS["ray_start"]["time"],
    )
    return 0 if kept else 1


def _fresh_process(program: str) -> Measure:
    """Return a measure that runs a program in a process of its own and reads the seconds that it prints."""

    def measure() -> float:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        found = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode != 0 or not found or float(found[0][1]) != 20.0:
            raise RuntimeError(f"a start failed:\n{done.stdout}{done.stderr}")
        return float(found[0][2])

    return measure


if __name__ == "__main__":
    raise SystemExit(main())
