"""A real Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import processes

__all__ = ["CPUS", "RayCluster"]

CPUS = 3
"""The CPUs of the cluster: two of the first node, and one of the second, which can be removed."""
# A node gives up if the Python processes that it starts have not imported Ray within 15 s, as on a busy machine.
_STARTS = 3
_RAYS = {"RAY_raylet_start_wait_time_s": "40", "RAY_USAGE_STATS_ENABLED": "0"}


class RayCluster:
    """A Ray cluster in a process of its own."""

    def __init__(self) -> None:
        for _ in range(_STARTS):
            self.folder = Path(tempfile.mkdtemp(prefix="r", dir=os.environ["TMPDIR"]))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ray_cluster"],
                env={**os.environ, "RAY_TMPDIR": str(self.folder), **_RAYS},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                self.address = str(self._answer())
                break
            except EOFError:
                self.close()
        else:
            raise AssertionError(f"Ray did not start in {_STARTS} attempts; stderr has its errors")
        processes.OF_MODULE.update(processes.children_of_this_run())

    def _answer(self) -> object:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise EOFError("the process of the Ray cluster has ended")

    def do(self, action: str) -> object:
        """Have the process do something: "add" or "remove" a node, or return the "free" CPUs."""
        assert self._process.stdin is not None
        self._process.stdin.write(action + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the cluster."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        for process in processes.children_of_this_run().values():
            command = " ".join(process.cmdline())
            if "/ray/" in command or command.startswith("ray::"):  # a worker gives itself such a name
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> None:
    """Serve a Ray cluster: a line of standard input is an action, and a line of output its result."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints notices

    import ray
    from ray.cluster_utils import Cluster

    # Each process that is left out spares a second of CPU time.
    head = {"num_cpus": CPUS - 1, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer(cluster.address)
    for line in sys.stdin:
        if line == "add\n":
            nodes.append(cluster.add_node(num_cpus=1))
            cluster.wait_for_nodes()
        elif line == "remove\n":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        answer(ray.available_resources().get("CPU", 0.0))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
