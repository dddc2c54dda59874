"""Clusters with workers and servers: of a notebook, of TF_CONFIG's processes, and of one process's servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distnb
from distnb.cluster_resolver import SimpleClusterResolver
from distnb.errors import StartError
from distnb.servers.variables.here import servers_here
from tests.servers.test_server import free_addresses
from tests.support import processes
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_COORDINATOR = """
import json, os, sys, torch, distnb
from distnb.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver
from distnb.notebook import compose
from distnb.servers.variables.here import servers_here

def report():
    print(json.dumps([[row.task, row.pid, row.state] for row in compose.require().status()]), flush=True)

def total():
    strategy = distnb.MirroredStrategy()
    parts = strategy.run(lambda: torch.tensor(1.0 + distnb.replica_id()))
    return float(strategy.reduce("sum", parts, axis=None))
"""
"""The first lines of the coordinators' scripts."""


# -- engines of a notebook ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(env={"OMP_NUM_THREADS": "1"}) as made:
        processes.OF_MODULE.add(made.pid)
        ran = made.run("%distnb start --workers 2 --ps 1", timeout_s=120)
        assert "3 engines ready: worker 0 on cpu:0, worker 1 on cpu:1, ps 0 on cpu:0." in ran.text
        made.run("import torch, distnb, distnb.notebook.compose; cluster = distnb.notebook.compose.current()")
        yield made


def test_status_shows_roles(notebook: Notebook) -> None:
    assert notebook.value("{engine: str(task) for engine, task in cluster.tasks.items()}") == {
        0: "worker 0",
        1: "worker 1",
        2: "ps 0",
    }
    rows = [line.split() for line in notebook.run("%distnb status").text.splitlines()]
    assert rows[0][:3] == ["engine", "task", "device"]
    assert rows[3][:4] == ["2", "ps", "0", "cpu:0"]
    assert "worker 0, ps 0" in notebook.run("%distnb devices").text


def test_other_strategies_run_on_the_workers(notebook: Notebook) -> None:
    notebook.run("""%%distribute mirrored
with strategy.scope():
    layer = torch.nn.Linear(2, 1)
there = strategy.reduce("sum", strategy.run(lambda: torch.tensor(1)), axis=None).item()
""")
    assert notebook.value("[there, strategy.num_replicas_in_sync]") == [2, 2]
    notebook.run("import os, signal; os.kill(cluster.status()[2].pid, signal.SIGKILL)")
    processes.wait_until(lambda: notebook.value("cluster.status()[2].state") != "idle", 20)
    ran = notebook.run("%%distribute mirrored\nthere = strategy.num_replicas_in_sync")
    assert "ended" not in ran.text  # a server is not a replica of a program
    failed = notebook.try_run("%%distribute mirrored -n 3\npass")
    assert "needs 3 replicas, but the cluster has 2" in failed.error_text


def test_a_server_and_a_worker_can_be_replaced(notebook: Notebook) -> None:
    before = notebook.value("layer.weight.numpy().tolist()")
    pids = notebook.value("[row.pid for row in cluster.status()]")
    notebook.run("os.kill(cluster.status()[1].pid, signal.SIGKILL)")
    processes.wait_until(lambda: notebook.value("cluster.status()[1].state") != "idle", 20)
    restarted = notebook.run("%distnb restart --missing", timeout_s=90)
    assert restarted.stdout == "2 engines replaced: 1, 2.\n"
    assert [data["text/plain"] for data in restarted.displays][-1:] == [""], "its progress is not shown any more"
    after = notebook.value("[(row.task, row.state, row.pid) for row in cluster.status()]")
    assert [each[:2] for each in after] == [("worker 0", "idle"), ("worker 1", "idle"), ("ps 0", "idle")]
    assert [new == old for (*_, new), old in zip(after, pids, strict=True)] == [True, False, False]
    notebook.run(
        "%%distribute mirrored\nweights = strategy.gather(strategy.run(lambda: layer.weight.detach()), 0).tolist()"
    )
    assert notebook.value("strategy.local_results(weights)[0]") == before * 2


def test_parameter_servers_need_a_cluster_with_servers(notebook: Notebook) -> None:
    notebook.run("%distnb stop\n%distnb start -n 1", timeout_s=90)
    failed = notebook.try_run("from distnb.servers.variables.here import servers_here; servers_here.require(None)")
    assert failed.error_name == "OptionError"
    assert "has no parameter servers" in failed.error_text
    assert "%distnb start --workers 2 --ps 1" in failed.error_text


def test_a_parameter_server_cell_runs_in_the_notebook(notebook: Notebook) -> None:
    cell = "%%distribute parameter_server\nmade = [strategy, coordinator]\nhere = os.getpid()"
    assert "has no parameter servers" in notebook.try_run(cell).error_text
    notebook.run("%distnb stop\ncoordinator = 'mine'")
    assert "starting one of 2 workers and 1 parameter server" in notebook.run(cell, timeout_s=90).text
    assert notebook.value("[here == os.getpid(), coordinator]") == [True, "mine"]
    kinds = ["ParameterServerStrategy", "ClusterCoordinator"]
    assert notebook.value("[type(each).__name__ for each in made]") == kinds
    notebook.run("del coordinator; first = made")
    notebook.run(cell)
    assert notebook.value("[new is old for new, old in zip(made, first)] + [coordinator is made[1]]") == [True] * 3
    # Its scope is an ordinary context in other cells, too.
    notebook.run("with strategy.scope():\n    here, variable = os.getpid(), distnb.Variable(2.0)")
    assert notebook.value("here == os.getpid()")
    assert notebook.value("str(variable.device)") == "/job:ps/replica:0/task:0/device:CPU:0"


# -- servers that wait for their coordinator ---------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide the user's own secret for this test."""
    monkeypatch.delenv("DISTNB_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def running(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a Python process whose standard streams are pipes."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *words], env={**os.environ, **variables}, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_report(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return json.loads(line)


def gone(pids: list[int]) -> None:
    for pid in pids:
        processes.ends(pid, 10)


@pytest.mark.usefixtures("cache")
def test_a_chief_under_tf_config_waits_for_its_servers_and_replaces_one() -> None:
    addresses = free_addresses(4)
    cluster = {"chief": addresses[:1], "worker": addresses[1:3], "ps": addresses[3:]}

    def task(job: str, index: int) -> dict[str, str]:
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}

    def server(job: str, index: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        return running("-m", "distnb", "worker", **task(job, index))

    script = f"""{_COORDINATOR}
servers_here.require(TFConfigClusterResolver())
report()
while sys.stdin.readline():
    print(json.dumps([total(), compose.require().restart(missing=True)]), flush=True)
    report()
"""
    with contextlib.ExitStack() as stack:
        stack.enter_context(server("worker", 0))
        chief = stack.enter_context(running("-c", script, **task("chief", 0)))
        assert chief.stdin is not None
        assert chief.stderr is not None
        assert "distnb: waiting for" in chief.stderr.readline()
        stack.enter_context(server("worker", 1))
        lost = stack.enter_context(server("ps", 0))
        rows = read_report(chief)
        assert [each[0] for each in rows] == ["worker 0", "worker 1", "ps 0"]
        lost.kill()  # and its engine with it
        gone([rows[2][1]])
        stack.enter_context(server("ps", 0))
        chief.stdin.write("\n")
        chief.stdin.flush()
        assert read_report(chief) == [3.0, [2]]
        rows = read_report(chief)
        assert [(task, state) for task, _, state in rows] == [
            ("worker 0", "idle"),
            ("worker 1", "idle"),
            ("ps 0", "idle"),
        ]
        chief.send_signal(signal.SIGKILL)
        gone([pid for _, pid, _ in rows])


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("ending", ["kill", pytest.param("stop", marks=pytest.mark.soak)])
def test_servers_in_the_coordinators_process_leave_nothing_behind(ending: str) -> None:
    """Make them as TensorFlow's tutorial does. A forked process would keep everything open here."""
    worker, ps = (free_addresses(2), free_addresses(1))
    script = f"""{_COORDINATOR}
cluster = {{"worker": {worker!r}, "ps": {ps!r}}}
servers = [distnb.Server(cluster, job, index) for job in cluster for index in range(len(cluster[job]))]
servers_here.require(SimpleClusterResolver(cluster))
servers_here.require(None)
try:
    servers_here.require(SimpleClusterResolver({{"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}}))
except ValueError as error:
    print(json.dumps([total(), str(error)]), flush=True)
report()
if child := os.fork():
    print(json.dumps(child), flush=True)
sys.stdin.readline()
distnb.stop()
for server in servers:
    server.stop()
    server.join()
print(json.dumps("ended"), flush=True)
"""
    with running("-c", script) as coordinator:
        value, error = read_report(coordinator)
        assert value == 3.0
        assert "names worker 0, ps 0, but the running cluster has worker 0, worker 1, ps 0" in error
        engines = [pid for _, pid, _ in read_report(coordinator)]
        child = read_report(coordinator)
        try:
            if ending == "kill":
                coordinator.kill()
            gone(engines) if ending == "kill" else None
        finally:
            os.kill(child, signal.SIGKILL)
        if ending == "stop":
            assert coordinator.stdin is not None
            coordinator.stdin.write("\n")
            coordinator.stdin.flush()
            assert read_report(coordinator) == "ended"
            gone(engines)
            assert coordinator.wait(20) == 0


@pytest.mark.usefixtures("cache")
def test_unresponsive_servers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_START_TIMEOUT", "1")
    addresses = free_addresses(3)
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    server = distnb.Server(cluster, "worker", 0)
    try:
        with pytest.raises(StartError) as caught:
            servers_here.require(SimpleClusterResolver(cluster))
    finally:
        server.stop()
        server.join()
    text = str(caught.value)
    assert f"There is no connection to the server of worker 1 at {addresses[1]}." in text
    assert f"There is no connection to the server of ps 0 at {addresses[2]}." in text
    assert "worker 0" not in text
    assert text.count("did not answer within 1 s") == 2
