"""Engines on a real Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.kernel import Notebook, lines_of_each
from tests.support.ray_cluster import CPUS, RayCluster
from tests.support.remote_engines import check_detached

# Not imported here: that takes seconds in each worker of the test run.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

ROOT = Path(__file__).parents[2]
_FREED_WITHIN_S = 10.0
SUM = """%%distribute mirrored
import torch
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(total.item())"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def notebook(cluster: RayCluster) -> Iterator[Notebook]:
    with Notebook() as notebook:
        processes.OF_MODULE.update(processes.children_of_this_run())
        yield notebook


def _wait_until_free(cluster: RayCluster) -> None:
    processes.wait_until(lambda: cluster.do("free") == CPUS, _FREED_WITHIN_S, "Ray's resources are not free")


def test_too_many_engines_are_an_error_with_rays_figures(cluster: RayCluster, notebook: Notebook) -> None:
    failed = notebook.try_run(f"%distnb start --ray {cluster.address} -n 5")
    assert failed.error_name == "StartError", failed.traceback
    assert "Ray did not reserve 5 × 1 CPU" in failed.error_text
    assert "The cluster has 2 nodes" in failed.error_text
    assert "Free: 3 CPU." in failed.error_text
    _wait_until_free(cluster)


def test_an_address_of_rays_client_is_an_error(notebook: Notebook) -> None:
    failed = notebook.try_run("%distnb start --ray ray://127.0.0.1:10001 -n 2")
    assert failed.error_name == "OptionError", failed.traceback
    assert "ray://127.0.0.1:10001 leads to Ray's client server" in failed.error_text


def test_an_address_at_which_ray_does_not_answer_is_an_error_at_once(notebook: Notebook) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = notebook.start(f"%distnb start --ray 127.0.0.1:{port} -n 2")
        connected, _ = other.accept()
        with connected:
            connected.sendall(b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n")
        failed = notebook.finish(message)
        assert failed.error_name == "StartError", failed.traceback
        assert "another service answers" in failed.error_text
    refused = notebook.try_run(f"%distnb start --ray 127.0.0.1:{port} -n 2")
    assert refused.error_name == "StartError", refused.traceback
    assert f"There is no Ray cluster at '127.0.0.1:{port}'" in refused.error_text


@pytest.mark.soak  # test_hosts.py tests it on machines that ssh reaches
def test_ray_reserves_and_frees_the_bundles_of_a_resize(cluster: RayCluster, notebook: Notebook) -> None:
    notebook.run(f"%distnb start --ray {cluster.address} -n 2", timeout_s=120)
    assert cluster.do("free") == 1
    failed = notebook.try_run("%distnb resize 4", timeout_s=60)
    assert "Ray did not reserve 2 × 1 CPU" in failed.error_text
    assert "The cluster has 2 engines, as before." in failed.error_text
    notebook.run("%distnb resize 3", timeout_s=120)
    assert cluster.do("free") == 0
    assert lines_of_each(notebook.run(SUM).stdout, 3) == [["3.0"]] * 3
    notebook.run("%distnb resize 2", timeout_s=60)
    processes.wait_until(lambda: cluster.do("free") == 1, _FREED_WITHIN_S, "Ray's bundle is not free")
    assert lines_of_each(notebook.run(SUM).stdout, 2) == [["2.0"]] * 2
    notebook.run("%distnb stop")
    _wait_until_free(cluster)


def test_engines_compute_on_all_nodes_and_a_lost_one_is_replaced(cluster: RayCluster, notebook: Notebook) -> None:
    notebook.run(f"%distnb start --ray {cluster.address} -n 3 --spread", timeout_s=120)
    assert cluster.do("free") == 0
    assert lines_of_each(notebook.run(SUM).stdout, 3) == [["3.0"]] * 3
    cluster.do("remove")
    ended = "len([row for row in distnb.notebook.compose.require().status() if row.state != 'idle'])"
    notebook.run("import distnb, distnb.notebook.compose")
    processes.wait_until(lambda: notebook.value(ended) == 1, 30.0, "the loss was not noticed")
    cluster.do("add")
    notebook.run("%distnb restart --missing", timeout_s=120)
    assert lines_of_each(notebook.run(SUM).stdout, 3) == [["3.0"]] * 3
    notebook.run("%distnb stop")
    _wait_until_free(cluster)
    assert notebook.value("__import__('ray').is_initialized()") is False


@pytest.mark.soak
def test_a_notebook_keeps_its_own_connection_to_ray(cluster: RayCluster, notebook: Notebook) -> None:
    notebook.run(f"import ray\nray.init({cluster.address!r}, log_to_driver=False, logging_level='error')")
    failed = notebook.try_run("%distnb start --ray 10.9.9.9:6379")
    assert failed.error_name == "OptionError", failed.traceback
    assert f"connected to the Ray cluster at {cluster.address}" in failed.error_text
    failed = notebook.try_run("%distnb start --ray --cpus-per-engine 0")
    assert failed.error_name == "OptionError", failed.traceback
    assert "cpus_per_engine=0 without GPUs" in failed.error_text
    notebook.run("%distnb start --ray", timeout_s=120)
    assert lines_of_each(notebook.run(SUM).stdout, 2) == [["2.0"]] * 2
    notebook.run("%distnb stop")
    _wait_until_free(cluster)
    assert notebook.value("ray.is_initialized()") is True
    notebook.run("ray.shutdown()")


@pytest.mark.soak  # tests/soak/test_kills_at_any_moment.py
def test_the_end_of_the_notebook_frees_everything(cluster: RayCluster) -> None:
    with Notebook() as killed:
        killed.run(f"%distnb start --ray {cluster.address} --workers 2 --ps 1", timeout_s=120)
        assert "ps 0" in killed.run("%distnb status").text
        os.kill(killed.pid, signal.SIGKILL)
        _wait_until_free(cluster)


@pytest.mark.soak  # test_detached.py tests it on machines that ssh reaches
def test_engines_stay_when_their_notebook_is_killed(cluster: RayCluster) -> None:
    def meanwhile() -> None:
        assert cluster.do("free") == CPUS - 2

    # The daemon connects to the cluster to which the notebook is connected.
    connect = f"import ray\nray.init({cluster.address!r}, log_to_driver=False, logging_level='error')\n"
    check_detached(f"{connect}%distnb start --ray -n 2", 2, {}, meanwhile)
    _wait_until_free(cluster)


def _run(cluster: RayCluster, program: str, *folders: str) -> str:
    """Run a program on the cluster, and return its output."""
    env = {**os.environ, "RAY_ADDRESS": cluster.address, "RAY_TMPDIR": str(cluster.folder)}
    env["PYTHONPATH"] = os.pathsep.join([*folders, str(ROOT)])
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_script_in_the_documentation_trains_in_tasks(cluster: RayCluster) -> None:
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(import ray\n.*?)```", page, flags=re.DOTALL)
    first, second = (float(loss) for loss in _run(cluster, program).split())
    assert first == second
    assert 0 < first < 1.0
    _wait_until_free(cluster)


ACTORS = """
import ray
import torch

import distnb

try:
    distnb.cluster_resolver.RayClusterResolver(2)
except ValueError as error:
    print(error)


@ray.remote(num_cpus=1)
class Trainer:
    def train(self, resolver, task):
        resolver.task_id = task
        strategy = distnb.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(1.0 + distnb.replica_id())), axis=None)
        resolver = strategy.cluster_resolver
        spec = resolver.cluster_spec()
        assert resolver.master() == spec.task_address("worker", task)
        return resolver.task_type, resolver.task_id, total.item(), spec.num_tasks("worker"), resolver.num_accelerators()


ray.init(log_to_driver=False, logging_level="error")
resolver = distnb.cluster_resolver.RayClusterResolver(2)
try:
    resolver.cluster_spec()
except ValueError as error:
    print(error)
trainers = [Trainer.remote() for _ in range(2)]
print(ray.get([trainer.train.remote(resolver, 1 - number) for number, trainer in enumerate(trainers)]))
try:
    ray.get(trainers[0].train.remote(distnb.cluster_resolver.RayClusterResolver(2), 2))
except ValueError as error:
    print(error)
"""


@pytest.mark.soak  # the documentation's script tests the resolver in tasks
def test_actors_are_workers_of_a_cluster(cluster: RayCluster) -> None:
    lines = _run(cluster, ACTORS).splitlines()
    assert "This process is not connected to a Ray cluster. Call ray.init()" in lines[0]
    assert "This process is not one of Ray's workers" in lines[1]
    assert lines[2] == "[('worker', 1, 3.0, 2, {}), ('worker', 0, 3.0, 2, {})]"
    assert "This is worker 2 of a RayClusterResolver(2)" in "".join(lines[3:])
    _wait_until_free(cluster)


TRAINER = """
import os

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

import distnb


def train(config):
    strategy = distnb.MultiWorkerMirroredStrategy(**config)
    total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(1.0 + distnb.replica_id())), axis=None)
    assert (strategy.num_replicas_in_sync, total.item()) == (2, 3.0)
    assert distnb.replica_id() == ray.train.get_context().get_world_rank()
    ray.train.report({"total": total.item()})


variables = {"PYTHONPATH": os.environ["PYTHONPATH"]}
ray.init(log_to_driver=False, logging_level="error", runtime_env={"env_vars": variables})
for config in ({}, {"cluster_resolver": distnb.cluster_resolver.RayClusterResolver(2)}):
    scaling = ray.train.ScalingConfig(num_workers=2)
    storage = ray.train.RunConfig(storage_path=os.environ["RAY_TMPDIR"])
    print(TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=storage).fit().error)
"""


@pytest.mark.soak
def test_strategies_run_in_ray_trains_workers(cluster: RayCluster) -> None:
    folder = Path(sys.prefix) / "ray-train"
    if not folder.exists():
        pytest.skip("the packages of Ray Train are not installed: make .venv/.made-ray-train")
    assert _run(cluster, TRAINER, str(folder)).splitlines()[-2:] == ["None", "None"]
    _wait_until_free(cluster)
