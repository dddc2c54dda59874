"""Servers that wait for a notebook, and the notebook that uses them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import distnb
from distnb.cluster_resolver import SimpleClusterResolver
from distnb.errors import OptionError, StartError
from tests.support import processes
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@dataclass
class Servers:
    """Two workers of one cluster."""

    addresses: list[str]
    processes: list[subprocess.Popen[str]]
    secret: Path

    def start(self, secret: Path | None = None) -> str:
        """Return a cell that uses the servers."""
        resolver = f"distnb.cluster_resolver.SimpleClusterResolver({{'worker': {self.addresses!r}}})"
        path = str(secret or self.secret)
        return f"import distnb; cluster = distnb.start(on=distnb.Servers({resolver}, 1, secret={path!r}))"


def _make_secret(path: Path, text: str = "s" * 40, mode: int = 0o600) -> Path:
    path.touch()
    path.chmod(mode)
    path.write_text(text)
    return path


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    secret = _make_secret(tmp_path_factory.mktemp("secret") / "secret")
    addresses = free_addresses(2)
    started = []
    for index, words in enumerate((["distnb.server", "--secret-file", str(secret)], ["distnb", "worker"])):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": ""}
        if index:
            environment["DISTNB_SECRET_FILE"] = str(secret)
        command = [sys.executable, "-m", *words]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    processes.OF_MODULE.update(each.pid for each in started)
    try:
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline().startswith("distnb: waiting for a notebook at distnb://127.0.0.1:")
        yield Servers(addresses, started, secret)
    finally:
        for each in started:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()


@pytest.fixture(scope="module")
def notebook(servers: Servers) -> Iterator[Notebook]:
    with Notebook() as made:
        processes.OF_MODULE.add(made.pid)
        made.run("import torch; torch.set_num_threads(1)")
        yield made


def test_only_clients_with_the_secret_are_served(servers: Servers, notebook: Notebook, tmp_path: Path) -> None:
    failed = notebook.try_run(servers.start(_make_secret(tmp_path / "wrong", "t" * 40)))
    assert failed.error_name == "StartError"
    assert f"There is no connection to the server at {servers.addresses[0]}." in failed.error_text
    assert "Does it run there, with the same secret?" in failed.error_text
    assert all(each.poll() is None for each in servers.processes)


def test_a_server_that_cannot_start_a_process_reports_that_and_goes_on(servers: Servers, notebook: Notebook) -> None:
    pid = servers.processes[1].pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    few = psutil.Process(pid).num_fds() + 4  # enough for the client, and not for the pipes to a machine agent
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        failed = notebook.try_run(servers.start())
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert failed.error_name == "StartError"
    assert "cannot start a process: [Errno 24] Too many open files" in failed.error_text
    assert all(each.poll() is None for each in servers.processes)


def test_a_server_closes_connections_without_the_secret(servers: Servers) -> None:
    host, _, port = servers.addresses[1].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20.0) as idle:
        while idle.recv(1000):  # ZeroMQ's greeting, then the end
            pass


def test_engines_of_servers_compute_together(servers: Servers, notebook: Notebook) -> None:
    notebook.run("%env DISTNB_LOG=info")
    notebook.run(servers.start(), timeout_s=120)
    notebook.run("%env DISTNB_LOG=off")
    notebook.run("""%%distribute mirrored
total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(1.0 + distnb.replica_id())), axis=None).item()
""")
    assert notebook.value("total") == 3.0
    logs = notebook.value("cluster.engines.log_texts()")
    assert {"notebook", "machine-agent", "engine-0", "machine-agent-1", "engine-1", "guardian-1"} <= logs.keys()
    assert "generation 1 of (0, 1) is formed" in logs["engine-1"]
    notebook.run("%distnb logs --level off")


def test_a_strategy_runs_on_the_servers_cluster(servers: Servers, notebook: Notebook) -> None:
    notebook.run(f"resolvers = distnb.cluster_resolver; workers = {servers.addresses!r}")
    notebook.run(
        "s = distnb.MultiWorkerMirroredStrategy(resolvers.SimpleClusterResolver({'worker': workers}))\n"
        "twice = s.reduce('sum', s.run(lambda: torch.tensor(1.0 + distnb.replica_id())), axis=None).item()"
    )
    assert notebook.value("[twice, s.num_replicas_in_sync]") == [3.0, 2]
    assert notebook.value("s.cluster_resolver.master('worker', 0)") == servers.addresses[0]
    failed = notebook.try_run(
        "distnb.MultiWorkerMirroredStrategy(resolvers.SimpleClusterResolver({'worker': ['a:1', 'b:1']}))"
    )
    assert failed.error_name == "OptionError"
    assert f"run on its engines, on {', '.join(servers.addresses)}, and the cluster_resolver says" in failed.error_text


def test_a_killed_server_is_reported(servers: Servers, notebook: Notebook) -> None:
    lost = notebook.value("cluster.status()[1].pid")
    ended = notebook.try_run(f"""%%distribute mirrored
import os, signal
import torch.distributed as dist
if dist.get_rank() == 0:
    os.kill({servers.processes[1].pid}, signal.SIGKILL)
while True:
    dist.all_reduce(torch.ones(1))
""")
    assert ended.error_name in ("EngineDied", "CollectiveError"), ended.traceback
    # At once: the closed connection shows that the server is gone.
    notebook.run("%%distribute mirrored\nleft = strategy.num_replicas_in_sync")
    assert notebook.value("left") == 1
    assert notebook.value("['cannot be reached' in row.state for row in cluster.status()]") == [False, True]
    processes.ends(lost, 20)


def test_a_server_stops_on_request(servers: Servers, notebook: Notebook) -> None:
    server, engine = servers.processes[0], notebook.value("cluster.status()[0].pid")
    server.send_signal(signal.SIGTERM)
    assert server.wait(40) == 0
    processes.ends(engine, 20)
    notebook.run("%distnb stop")


@pytest.mark.parametrize("protocol", ["grpc", ""])
def test_an_unknown_protocol_is_refused(protocol: str) -> None:
    with pytest.raises(OptionError, match="servers use 'distnb'"):
        distnb.Server({"worker": ["127.0.0.1:2222"]}, "worker", 0, protocol)


def test_arguments_that_define_no_server_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTNB_SECRET_FILE", raising=False)
    spec = {"worker": ["127.0.0.1:2222", "192.0.2.1:2222"]}
    with pytest.raises(StartError, match="none is named"):
        distnb.Server(spec, "worker", 0)
    with pytest.raises(StartError, match="mode 644"):
        distnb.Server(spec, "worker", 0, secret=_make_secret(tmp_path / "open", mode=0o644))
    with pytest.raises(StartError, match="has 3 bytes"):
        distnb.Server(spec, "worker", 0, secret=_make_secret(tmp_path / "short", "abc"))
    secret = _make_secret(tmp_path / "secret")
    with pytest.raises(StartError, match=r"No network interface of this machine has the address 192\.0\.2\.1"):
        distnb.Server(spec, "worker", 1, secret=secret)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot listen on {address}: Address already in use.*another port"):
            distnb.Server({"worker": [address]}, "worker", 0, secret=secret)
    with pytest.raises(StartError, match="none is named"):
        distnb.start(on=distnb.Servers(SimpleClusterResolver(spec)))
    with pytest.raises(OptionError, match="n=3, but the machines have other numbers of engines"):
        distnb.start(3, on=distnb.Servers(SimpleClusterResolver(spec), 1, secret=secret))


def test_a_local_server_listens_once_it_is_started(tmp_path: Path) -> None:
    secret = _make_secret(tmp_path / "secret")
    server = distnb.Server.create_local_server(start=False, secret=secret)
    assert server.target == "distnb://127.0.0.1:0"
    server.start()
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10):
        pass
    server.stop()
    server.join()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=10)
