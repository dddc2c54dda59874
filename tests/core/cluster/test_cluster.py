"""Engines of one machine: started, watched, restarted, ended. The agent is replaced; processes and files are real."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import ipyparallel
import psutil
import pytest
import torch

from distnb.cluster.lifecycle import Cluster
from distnb.cluster.rendezvous_store import RendezvousStore
from distnb.compat import torch_internals
from distnb.errors import NoClusterError, StartError
from tests.support import processes
from tests.support.clusters import make_cluster, running_cluster
from tests.support.sessions import run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]
_WITHIN_S = 20.0  # the limit for immediate events on a busy machine


def test_the_end_of_an_engine_is_reported_at_once_and_ends_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_TEST_BEHAVIOUR", "workers:1")
    exits: list[tuple[int, int, str]] = []
    with running_cluster(2, on_exit=lambda *exit: exits.append(exit)) as cluster:
        pid = cluster.engines[1].pid
        workers = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        assert len(workers) >= 2
        os.kill(pid, signal.SIGKILL)
        processes.wait_until(lambda: bool(exits), _WITHIN_S)
        assert exits[0] == (1, pid, "was killed by SIGKILL")
        for worker in workers:
            processes.ends(worker, _WITHIN_S)
        assert cluster.missing == (1,)
        assert cluster.engines[1].ended == "was killed by SIGKILL"
        assert cluster.engines[0].ended == ""
    assert len(exits) == 1  # engines ended by `stop` are not reported


@pytest.mark.usefixtures("real_processes")
def test_restart_replaces_a_dead_engine() -> None:
    with running_cluster(2) as cluster:
        processes.wait_until(cluster.client_file.exists, 20)
        with ipyparallel.Client(str(cluster.client_file)) as client:
            client.wait_for_engines(2, timeout=30)
            before, old = cluster.engines, client._engines[0]
            os.kill(before[0].pid, signal.SIGKILL)
            processes.wait_until(lambda: cluster.missing == (0,), _WITHIN_S)
            cluster.restart(cluster.missing)
            assert cluster.missing == ()
            assert cluster.engines[1] == before[1]
            assert cluster.engines[0].pid != before[0].pid
            assert cluster.engines[0].device == before[0].device

            processes.wait_until(
                lambda: client.ids == [0, 1] and client._engines[0] != old,
                20,
                "ipyparallel knows the new engine by the old id",
            )
            assert client[:].apply_sync(os.getpid) == [process.pid for process in cluster.engines.values()]


def test_restart_replaces_living_engines_without_reporting_their_end() -> None:
    exits: list[object] = []
    with running_cluster(1, on_exit=lambda *exit: exits.append(exit)) as cluster:
        pid = cluster.engines[0].pid
        cluster.restart([0])
        assert cluster.engines[0].pid != pid
        assert not psutil.pid_exists(pid)
        assert cluster.engines[0].ready
    assert exits == []
    with pytest.raises(NoClusterError):
        cluster.restart([0])


def test_an_engine_that_fails_at_restart_is_missing_and_can_be_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(2) as cluster:
        other = cluster.engines[1]
        monkeypatch.setenv("DISTNB_TEST_BEHAVIOUR", "raise:0")
        with pytest.raises(StartError, match="flux capacitor"):
            cluster.restart([0])
        assert cluster.missing == (0,)
        assert cluster.engines[1] == other
        monkeypatch.delenv("DISTNB_TEST_BEHAVIOUR")
        cluster.restart(cluster.missing)
        assert cluster.missing == ()


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("raise:1", r"(?s)Engine 1 \(cpu:1\) exited with code 1 while it started.*flux capacitor is missing"),
        ("exit:0", r"Engine 0 \(cpu:0\) exited with code 3 while it started"),
    ],
)
def test_the_error_for_an_engine_that_dies_at_start_quotes_its_last_output(
    monkeypatch: pytest.MonkeyPatch, behaviour: str, text: str
) -> None:
    monkeypatch.setenv("DISTNB_TEST_BEHAVIOUR", behaviour)
    cluster = make_cluster(2)
    with pytest.raises(StartError, match=text):
        cluster.start()
    assert_nothing_left(cluster)


@pytest.mark.usefixtures("real_processes")
def test_a_module_to_preload_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_PRELOAD", "colorsys, no_such_module")
    cluster = make_cluster(1)
    with pytest.raises(StartError, match="DISTNB_PRELOAD names no_such_module, which an engine cannot import"):
        cluster.start()
    assert_nothing_left(cluster)


def test_a_module_to_preload_that_asks_for_gpus_asks_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA itself would refuse to work in the engines, which are forked."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    (tmp_path / "asks_for_gpus.py").write_text(
        "import os, pathlib, torch\n"
        "torch.cuda.is_available()\n"
        "asked = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DISTNB_PRELOAD", "asks_for_gpus")
    with started(1) as session:
        run_cell(
            session,
            "import os, sys\nasked = sys.modules['asks_for_gpus'].asked\nleft = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')",
            "asked",
        )
        assert (session.user_ns["asked"], session.user_ns["left"]) == ("1", None)


@pytest.mark.parametrize("refuses", [False, True])
def test_whether_cuda_would_refuse_forked_processes_is_known(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    here = os.getpid()
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: refuses and os.getpid() != here, raising=False)
    assert torch_internals.refuses_cuda_after_fork() is refuses


def test_an_engine_that_never_connects_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_TEST_BEHAVIOUR", "stall:0")
    cluster = make_cluster(1)
    with pytest.raises(StartError, match="Engine 0 did not come up within 3 s"):
        cluster.start(timeout_s=3)
    assert_nothing_left(cluster)


def test_an_interrupt_during_the_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_TEST_BEHAVIOUR", "stall")
    cluster = make_cluster(2)

    def interrupt() -> None:
        processes.wait_until(lambda: len(cluster.engines) == 2, 60)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.start(meanwhile=thread.start)
    thread.join()
    assert_nothing_left(cluster)


def test_a_failure_of_the_work_during_the_start_leaves_no_process() -> None:
    cluster = make_cluster(1)
    with pytest.raises(ZeroDivisionError):
        cluster.start(meanwhile=lambda: 1 / 0)
    assert_nothing_left(cluster)


@pytest.mark.usefixtures("real_processes")
def test_a_process_that_cannot_be_created_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distnb.cluster.local.forking.PYTHON_MODULE", ("/nowhere/python",))
    cluster = make_cluster(1)
    with pytest.raises(StartError, match=r"engine 0 could not be started: .*No such file"):
        cluster.start()
    assert_nothing_left(cluster)


def test_engines_that_cannot_be_adopted_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("distnb.cluster.local.forking.end_descriptor", refused)
    cluster = make_cluster(1)
    with pytest.raises(StartError, match=r"(?s)could not take over its engines.*Too many open files"):
        cluster.start(timeout_s=80)
    assert_nothing_left(cluster)


def test_progress_is_reported_while_engines_start() -> None:
    progress: list[str] = []
    cluster = make_cluster(2)
    cluster.start(on_progress=progress.append)
    cluster.stop()
    assert progress[0] == "starting 2 engines on cpu:0, cpu:1"
    assert progress[-1] == "2 of 2 engines ready"
    counts = ["0 of 2 engines ready", "1 of 2 engines ready", "2 of 2 engines ready"]
    assert progress[1:] == [each for each in counts if each in progress], "some may come up at once"


@pytest.mark.parametrize("behaviour", ["gil", "workers"])
def test_stop_ends_unresponsive_engines_and_their_workers(monkeypatch: pytest.MonkeyPatch, behaviour: str) -> None:
    monkeypatch.setenv("DISTNB_TEST_BEHAVIOUR", behaviour)
    cluster = make_cluster(2)
    cluster.start()
    if behaviour == "gil":
        processes.wait_for_computing([engine.pid for engine in cluster.engines.values()], 60)  # the lock is held
    cluster.stop()
    assert_nothing_left(cluster)
    cluster.stop()  # again: nothing happens


def test_the_rendezvous_store_is_served_on_loopback() -> None:
    import socket

    from torch.distributed import TCPStore

    store = RendezvousStore()
    early = TCPStoreThread(store.host, store.port)  # waits in the queue until the store is served
    served = store.serve()
    assert store.serve() is served
    early.join(20)
    assert served.get("from") == b"early"
    listening = {host for host, port in processes.listening_ports() if port == store.port}
    assert listening == {"127.0.0.1"}
    later = TCPStore(store.host, store.port, None, False)
    later.set("from", "later")
    assert served.get("from") == b"later"
    del served, later
    store.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((store.host, store.port), timeout=5)


class TCPStoreThread(threading.Thread):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(daemon=True)
        self.address = host, port
        self.start()

    def run(self) -> None:
        from torch.distributed import TCPStore

        TCPStore(*self.address, None, False).set("from", "early")


def assert_nothing_left(cluster: Cluster) -> None:
    # The workers of an engine are killed with it. The kernel may take a moment.
    processes.wait_until(lambda: not processes.children_of_this_run(), _WITHIN_S, "processes are left")
    assert not cluster.directory.exists()
