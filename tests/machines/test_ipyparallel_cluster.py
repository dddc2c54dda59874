"""Engines next to those of a real ipyparallel cluster of two engines, which are processes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest
from IPython.core.profiledir import ProfileDir
from IPython.paths import get_ipython_dir

import distnb
from distnb.errors import StartError
from distnb.machines.transports import ipyparallel_client
from tests.support import processes
from tests.support.kernel import Notebook, lines_of_each

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

_PROFILE = "machines"
_GONE_WITHIN_S = 10.0
_SUM = """%%distribute mirrored
import torch
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(total.item())"""
_STATES = "[row.state for row in distnb.notebook.compose.require().status()]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ipyparallel.Cluster]:
    folder = ProfileDir.create_profile_dir_by_name(get_ipython_dir(), _PROFILE).location
    cluster = ipyparallel.Cluster(n=2, profile=_PROFILE, log_level=40)
    try:
        cluster.start_cluster_sync()
        yield cluster
    finally:
        cluster.stop_cluster_sync()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def client(cluster: ipyparallel.Cluster) -> Iterator[ipyparallel.Client]:
    client = cluster.connect_client_sync()
    client.wait_for_engines(2, timeout=60)
    processes.OF_MODULE.update(processes.children_of_this_run())
    yield client
    client.close()


@pytest.fixture
def file(cluster: ipyparallel.Cluster) -> Path:
    """Return the connection file for clients."""
    return Path(cluster.profile_dir, "security", f"ipcontroller-{cluster.cluster_id}-client.json")


def ours() -> list[str]:
    """Return the processes that distnb has started next to ipyparallel's engines."""
    found = []
    for process in processes.children_of_this_run().values():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "distnb.machines" in command or command.endswith("-m distnb.engine"):
            found.append(command)
    return found


def wait_until_gone(client: ipyparallel.Client, engines: int = 2) -> None:
    """Wait until distnb's processes have ended, and check that ipyparallel's still run."""
    processes.wait_until(lambda: not ours(), _GONE_WITHIN_S, f"left: {ours()}")
    assert len(set(client[:].apply_sync(os.getpid))) == engines


def test_both_clusters_are_used_and_a_lost_engine_is_replaced(
    cluster: ipyparallel.Cluster, client: ipyparallel.Client, file: Path, tmp_path: Path
) -> None:
    with Notebook() as notebook:
        notebook.run(f"import distnb, distnb.notebook.compose, ipyparallel\nrc = ipyparallel.Client({str(file)!r})")
        notebook.run("distnb.start(on=distnb.IPythonParallel(rc)); None", timeout_s=120)
        go_on = tmp_path / "go on"
        running = notebook.start(
            "%%distribute mirrored\nimport os, time\nprint('begun')\nown = os.getpid()\n"
            f"while not os.path.exists({str(go_on)!r}):\n    time.sleep(0.01)"
        )
        notebook.wait_for_output(running, "begun")
        pids = client[:].apply_sync(os.getpid)
        go_on.touch()
        notebook.finish(running)
        assert not {notebook.pid, *pids} & set(notebook.value("strategy.local_results(own)"))
        assert lines_of_each(notebook.run(_SUM).stdout) == [["2.0"]] * 2
        assert "[stdout:1]" in notebook.run("%%px\nprint('here')").text

        os.kill(pids[1], signal.SIGKILL)
        lost = "(on ipyparallel-1) was ended (its ipyparallel engine has ended)"
        processes.wait_until(lambda: notebook.value(_STATES) == ["idle", lost], 30.0, "the loss was not noticed")
        processes.wait_until(lambda: notebook.value("rc.ids") == [0], 30.0)
        failed = notebook.try_run("%distnb restart --missing")
        assert failed.error_name == "StartError", failed.traceback
        assert "ipyparallel's engine 1 on" in failed.error_text
        assert "the cluster has no other engine" in failed.error_text

        cluster.start_engines_sync(1)
        client.wait_for_engines(2, timeout=60)
        processes.OF_MODULE.update(processes.children_of_this_run())
        notebook.run("rc.wait_for_engines(2, timeout=30); None")
        notebook.run("%distnb restart --missing", timeout_s=120)
        assert lines_of_each(notebook.run(_SUM).stdout) == [["2.0"]] * 2
        notebook.run("%distnb stop")
        wait_until_gone(client)


def test_the_end_of_the_notebook_ends_distnbs_engines_only(client: ipyparallel.Client, file: Path) -> None:
    with Notebook() as killed:
        killed.run(f"%distnb start --ipyparallel {file} --workers 1 --ps 1", timeout_s=120)
        assert "ps 0" in killed.run("%distnb status").text
        assert not killed.value("'px' in get_ipython().magics_manager.magics['line']")  # it is for the user's client
        os.kill(killed.pid, signal.SIGKILL)
        wait_until_gone(client)


def start_fails(cluster: Any, n: int | None = None, **options: Any) -> str:
    """Return the message of the StartError that a start raises."""
    with pytest.raises(StartError) as caught:
        distnb.start(n, on=distnb.IPythonParallel(cluster, **options))
    return str(caught.value)


def test_too_few_engines_are_an_error(cluster: ipyparallel.Cluster, client: ipyparallel.Client) -> None:
    for named in (client, _PROFILE, cluster):
        assert "engines (0, 2), but 5 are needed. Start more" in start_fails(named, n=5)


def test_a_busy_engine_is_an_error_and_keeps_its_task(client: ipyparallel.Client) -> None:
    task = client[0].apply_async(time.sleep, 3)
    assert "ipyparallel's engine 0 did not answer within 0 s. Another task" in start_fails(client, wait=0.2)
    assert not task.ready()
    task.get()
    assert client[0].apply_sync(os.getpid)
    assert ours() == []


def test_another_environment_is_an_error(client: ipyparallel.Client) -> None:
    module = "distnb.machines.transports.ipyparallel_engine"
    client[0].apply_sync(exec, f"import sys; kept = sys.modules[{module!r}]; sys.modules[{module!r}] = None", {})
    try:
        assert "ipyparallel's engine 0 has no distnb" in start_fails(client, n=1)
    finally:
        client[0].apply_sync(exec, f"import sys; del sys.modules[{module!r}]", {})
    client[0].apply_sync(exec, "import platform; platform.python_version = lambda: '3.99.1'", {})
    try:
        assert "on Python 3.99.1, but this is distnb" in start_fails(client, n=1)
    finally:
        client[0].apply_sync(exec, "import importlib, platform; importlib.reload(platform)", {})


def test_a_cluster_that_does_not_exist_is_an_error(
    file: Path, cluster: ipyparallel.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unknown in ("gpus", tmp_path / "ipcontroller-client.json", ipyparallel.Cluster(cluster_id="x", log_level=40)):
        assert "No ipyparallel cluster is running there" in start_fails(unknown)
    engines_file = file.with_name(file.name.replace("client", "engine"))
    assert "is not a connection file for ipyparallel's clients" in start_fails(engines_file)
    monkeypatch.setattr(ipyparallel_client, "_CONNECT_S", 0.5)
    stale = tmp_path / "stale.json"
    stale.write_text(json.dumps({**json.loads(file.read_text()), "registration": 9}))
    assert "No ipyparallel controller answers at the address in" in start_fails(stale)
