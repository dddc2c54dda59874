"""Engines started together, and replaced: what they share and what they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ipyparallel
import psutil
import pytest

from distnb.cluster.lifecycle import Cluster
from distnb.errors import StartError
from tests.support import processes
from tests.support.clusters import make_cluster, running_cluster
from tests.support.sessions import started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170), pytest.mark.usefixtures("real_processes")]
_AGENT = "tests.support.importing_agent"
_WITHIN_S = 20.0


def zombies() -> list[psutil.Process]:
    """Return the children that have ended and that nobody has waited for.

    A kernel's zygote (`tests.support.warm_engines`) becomes one if its kernel ends while this process adopts orphans.
    """
    children = psutil.Process().children()
    ended = [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
    return [child for child in ended if child.name() != processes.WARM_PYTHON]


def on_each(cluster: Cluster, function: Any) -> list[Any]:
    processes.wait_until(cluster.client_file.exists, _WITHIN_S)
    with ipyparallel.Client(str(cluster.client_file)) as client:
        client.wait_for_engines(len(cluster.engines), timeout=60)
        return list(client[:].apply_sync(function))


def chosen_at_random() -> dict[str, object]:
    import multiprocessing
    import random
    import tempfile
    import uuid

    import numpy

    return {
        "multiprocessing": bytes(multiprocessing.current_process().authkey),
        "numpy": numpy.random.random(),
        "random": random.random(),
        "tempfile": next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
        "uuid": uuid.uuid4(),
    }


def test_engines_are_children_of_the_notebook_and_share_memory_but_no_secret() -> None:
    with running_cluster(2, agent=_AGENT) as cluster:
        pids = {process.pid for process in cluster.engines.values()}
        ours = {child.pid: child for child in psutil.Process().children()}
        assert pids < set(ours)
        assert all(os.getsid(pid) == os.getpgid(pid) == pid for pid in pids)
        one, other = on_each(cluster, chosen_at_random)
        assert [name for name in one if one[name] == other[name]] == []
        left = processes.children_of_this_run()
        assert len({pid for pid in left if "distnb.engine" in left[pid].cmdline()} - pids) == 1, "the template stays"
        assert zombies() == []
        for each in (psutil.Process(pid).memory_full_info() for pid in pids):
            assert each.uss < each.rss / 2


def test_modules_that_start_a_thread_are_imported_by_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def lives() -> bool:
        import sys

        return bool(sys.modules["tests.support.importing_agent"].thread.is_alive())

    monkeypatch.setenv("DISTNB_TEST_IMPORT", "thread")
    with running_cluster(2, agent=_AGENT) as cluster:
        assert on_each(cluster, lives) == [True, True]


def test_the_error_for_a_failed_import_quotes_its_last_output() -> None:
    cluster = make_cluster(2, agent="tests.support.no_agent")
    with pytest.raises(
        StartError, match=r"(?s)Engine 0 \(cpu:0\) exited with code 1 while it started.*No module named"
    ):
        cluster.start()
    assert not processes.children_of_this_run()


def test_a_process_killed_while_loading_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_TEST_IMPORT", "stall")
    cluster = make_cluster(2, agent=_AGENT)
    failures: list[StartError] = []

    def start() -> None:
        with pytest.raises(StartError) as caught:
            cluster.start()
        failures.append(caught.value)

    starting = threading.Thread(target=start)
    starting.start()
    processes.wait_until(lambda: len(cluster.engines) == 2, _WITHIN_S)
    os.kill(cluster.engines[0].pid, signal.SIGKILL)
    starting.join(_WITHIN_S)
    assert "Engine 0 (cpu:0) was killed by SIGKILL while it started" in str(failures[0])
    assert not processes.children_of_this_run()


def _has_torch(process: psutil.Process) -> bool:
    return any("torch" in each.path for each in process.memory_maps())


def test_sigkill_of_the_notebook_ends_engines_that_are_loading() -> None:
    before = processes.run_directories()
    program = f"from tests.support.clusters import make_cluster; make_cluster(2, agent={_AGENT!r}).start()"
    notebook = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "DISTNB_TEST_IMPORT": "stall"})
    try:
        # The process that will fork the engines. The other one, the guardian, started in the same clock tick.
        processes.wait_until(lambda: any(map(_has_torch, psutil.Process(notebook.pid).children())), 60, "nothing loads")
    finally:
        notebook.kill()
        notebook.wait()
    processes.wait_until(lambda: not processes.children_of_this_run(), 10.0, "processes are left")
    processes.wait_until(lambda: processes.run_directories() == before, 10.0, "files are left")


def test_an_engine_killed_just_now_is_missing() -> None:
    with started() as session:
        os.kill(session.status()[1].pid, signal.SIGKILL)
        assert session.restart(missing=True) == (1,)
        assert [row.state for row in session.status()] == ["idle", "idle"]
        assert session.restart(missing=True) == ()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert zombies() == []


def test_the_process_that_has_loaded_torch_forks_later_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def template(cluster: Cluster) -> int:
        left = processes.children_of_this_run()
        engines = {process.pid for process in cluster.engines.values()}
        (found,) = {pid for pid in left if "distnb.engine" in left[pid].cmdline()} - engines
        return found

    with running_cluster(2) as cluster:
        first = template(cluster)
        os.kill(cluster.engines[0].pid, signal.SIGKILL)
        processes.wait_until(lambda: cluster.missing == (0,), _WITHIN_S)
        cluster.restart([0])
        assert template(cluster) == first
        monkeypatch.setenv("DISTNB_TEST_SETTING", "1")  # modules may read it when they are imported
        cluster.restart([0])
        second = template(cluster)
        os.kill(second, signal.SIGKILL)
        cluster.restart([0])
        third = template(cluster)
        cluster.restart([0, 1])
        assert len({first, second, third, template(cluster)}) == 4
        assert cluster.missing == ()
        cluster.end_engines()  # to free their memory
        processes.wait_until(
            lambda: not any("distnb.engine" in each.cmdline() for each in processes.children_of_this_run().values()),
            _WITHIN_S,
        )
