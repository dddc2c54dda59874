"""The properties of a running cluster's engines, and access to them. One cluster serves all tests; none changes it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest
import zmq
from jupyter_client.session import Session

from distnb.cluster.lifecycle import Cluster
from tests.conftest import needs
from tests.support import engine_functions, processes
from tests.support.clusters import running_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ.pop("OMP_NUM_THREADS", None)
    try:
        with running_cluster(2) as cluster:
            processes.wait_until(cluster.client_file.exists, 20)
            yield cluster
    finally:
        os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Any]:
    client = ipyparallel.Client(str(cluster.client_file))
    client.wait_for_engines(2, timeout=30)
    yield client
    client.close()


def test_every_engine_is_ready_on_its_device(cluster: Cluster) -> None:
    engines = cluster.engines
    assert [(engine, str(process.device), process.ready, process.ended) for engine, process in engines.items()] == [
        (0, "cpu:0", True, ""),
        (1, "cpu:1", True, ""),
    ]
    assert cluster.missing == ()
    assert all(psutil.pid_exists(process.pid) for process in engines.values())


def test_ipyparallels_own_channel_still_works(cluster: Cluster, client: Any) -> None:
    pids = client[:].apply_sync(os.getpid)
    assert pids == [process.pid for process in cluster.engines.values()]
    assert client[:].apply_sync(engine_functions.identity, 7) == [(0, "cpu:0", 7), (1, "cpu:1", 7)]
    printed = client[:].execute("print('hello from', engine)", block=True)
    assert printed.stdout == ["hello from 0\n", "hello from 1\n"]


def test_engines_share_the_cores(client: Any) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert client[:].apply_sync(engine_functions.threads) == [(share, str(share), "lo")] * 2


def test_engines_load_no_debugger_by_default(client: Any) -> None:
    # Its import goes through sys.modules while another thread of a starting engine adds torch's modules: a race.
    assert client[:].apply_sync(engine_functions.debuggers) == [[], []]


def test_each_engine_leads_a_session_of_its_own(cluster: Cluster) -> None:
    for process in cluster.engines.values():
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid != os.getsid(0)


def test_an_interrupt_from_the_terminal_does_not_end_an_engine(cluster: Cluster, client: Any) -> None:
    for process in cluster.engines.values():
        os.kill(process.pid, signal.SIGINT)
    assert len(client[:].apply_sync(os.getpid)) == 2


def test_nothing_listens_on_a_port(cluster: Cluster, client: Any) -> None:
    ours = {os.getpid(), *processes.children_of_this_run()}
    listed = subprocess.run([needs("ss"), "-ltnpH"], capture_output=True, text=True, check=True).stdout
    assert [line for line in listed.splitlines() if any(f"pid={pid}," in line for pid in ours)] == []


def test_only_the_user_can_read_the_files(cluster: Cluster) -> None:
    assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o700
    secrets = [cluster.directory / "connection.json", *(cluster.directory / "security").iterdir()]
    assert len(secrets) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}


def test_no_secret_is_visible_in_the_process_list(cluster: Cluster) -> None:
    keys = json.loads((cluster.directory / "connection.json").read_text())
    secrets = [keys["client_secret"], json.loads(cluster.client_file.read_text())["curve_serverkey"]]
    for pid in processes.children_of_this_run():
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert not any(secret.encode() in shown for secret in secrets)


@pytest.mark.parametrize("guess", [False, True], ids=["without a key", "with another key"])
def test_a_client_without_the_key_cannot_run_code(cluster: Cluster, client: Any, tmp_path: Path, guess: bool) -> None:
    info = json.loads(cluster.client_file.read_text())
    forger = Session(key=info["key"].encode())
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = socket.sndtimeo = 1000
        if guess:
            socket.curve_serverkey = zmq.curve_keypair()[0]
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(f"{info['interface']}:{info['mux']}")
        code = f"open({str(tmp_path / 'was-here')!r}, 'w')"
        for engine in client[:].apply_sync(engine_functions.ident):
            message = forger.msg("execute_request", {"code": code, "silent": False, "user_expressions": {}})
            with contextlib.suppress(zmq.Again):  # the connection may have been refused already
                forger.send(socket, message, ident=[engine.encode()])
        assert not socket.poll(500)
    assert len(client[:].apply_sync(os.getpid)) == 2  # earlier messages have been handled
    assert not (tmp_path / "was-here").exists()


def test_a_forked_child_does_not_end_its_parents_engines(cluster: Cluster) -> None:
    child = os.fork()
    if child == 0:
        cluster.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert cluster.directory.exists()
    assert cluster.missing == ()
