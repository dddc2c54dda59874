"""Other users of the machine cannot do anything to a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

import distnb
from distnb.collectives.group.gloo_sockets import Connections, owner_of_peer
from distnb.errors import CollectiveError
from distnb.notebook.session import Session
from distnb.wire.channel import Link, Switchboard
from tests.support import processes
from tests.support.sessions import run_cell, started

_NOBODY = 65534
_ROUND_S = 0.05
_WITHIN_S = 20.0
_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f"  # ZeroMQ's; its version and mechanism follow
_SAID_FIRST = re.compile(rb"\xff\0{7}.\x7f", re.DOTALL)

pytestmark = [pytest.mark.processes, pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")]


def in_child(act: Callable[[], None], user: int = _NOBODY) -> int:
    """Run something in a process of another user, and return its pid."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            act()
            code = 0
        finally:
            os._exit(code)
    return child


# -- a hostile user -------------------------------------------------------------------------------------------------


def words() -> list[bytes]:
    """Return the messages to send to each port."""
    of_the_store = b"\0" + struct.pack("<I", 0x3C85F7CE)  # torch's greeting; then one asks for the number of keys
    of_gloo = [struct.pack("<q", number) for number in range(4)]
    of_zmq = _GREETING + b"\3\0NULL".ljust(54, b"\0") + b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER"
    return [random.randbytes(8), random.randbytes(3000), of_the_store + b"\7", *of_gloo, _GREETING + b"\3", of_zmq]


def talk(where: tuple[str, int]) -> list[bytes]:
    """Send all messages to one port, and return the answers."""
    answers = []
    for said in words():
        with contextlib.suppress(OSError), socket.socket() as opened:
            opened.settimeout(_ROUND_S)
            opened.connect(where)
            opened.sendall(said)
            answers.append(opened.recv(4096))
            answers[-1] += opened.recv(4096)
    return answers


def fuzz(asked: int, replies: int) -> None:
    """Connect to the addresses that arrive as lines of JSON, and report the number reached and their answers."""
    with os.fdopen(asked) as lines, os.fdopen(replies, "w") as file:
        for line in lines:
            addresses = json.loads(line)
            answers = [each for host, port in addresses for each in talk((host, port))]
            file.write(json.dumps([each.hex() for each in answers if each]) + "\n")
            file.flush()


class Stranger:
    """Another user, who connects to everything that listens until the block ends."""

    def __init__(self) -> None:
        (self._asked, self._ask), (self._reading, self._writing) = os.pipe(), os.pipe()

        def act() -> None:
            os.close(self._ask)
            os.close(self._reading)
            fuzz(self._asked, self._writing)

        self.pid = in_child(act)
        os.close(self._asked)
        os.close(self._writing)
        self._to, self._from = os.fdopen(self._ask, "w"), os.fdopen(self._reading)

    def talk_to(self, addresses: list[tuple[str, int]]) -> list[bytes]:
        """Do one round, and return the answers."""
        self._to.write(json.dumps(addresses) + "\n")
        self._to.flush()
        return [bytes.fromhex(each) for each in json.loads(self._from.readline())]

    def close(self) -> None:
        self._to.close()
        self._from.close()
        assert os.waitpid(self.pid, 0)[1] == 0


@contextlib.contextmanager
def stranger() -> Iterator[Stranger]:
    made = Stranger()
    try:
        yield made
    finally:
        made.close()


def listening() -> tuple[list[tuple[str, int]], list[str]]:
    """Return the ports and UNIX sockets on which the processes of this run listen."""
    ports: set[tuple[str, int]] = set()
    paths: set[str] = set()
    for process in [psutil.Process(), *processes.children_of_this_run().values()]:
        with contextlib.suppress(psutil.Error):
            inet = process.net_connections(kind="inet")
            ports |= {(each.laddr.ip, each.laddr.port) for each in inet if each.status == psutil.CONN_LISTEN}
            paths |= {each.laddr for each in process.net_connections(kind="unix") if each.laddr}
    return sorted(ports), sorted(paths)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with started() as session:
        run_cell(session, "import torch.distributed as dist, time, os\ntotal = torch.zeros(3)", "first")
        assert session.engines.cluster.client_file.exists()  # ipyparallel's controller listens, too
        yield session


def test_a_local_cluster_listens_in_its_private_directory_only(session: Session) -> None:
    directory = session.engines.cluster.directory
    run_cell(session, "import multiprocessing\nqueue = multiprocessing.SimpleQueue()\ndist.barrier()", "meets")
    ports, paths = listening()
    assert ports == []
    ours = [path for path in paths if "distnb" in path]
    assert ours
    assert [path for path in ours if not path.startswith(f"{directory}/")] == []

    def come() -> None:
        for path in ours:
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
                with contextlib.suppress(PermissionError), socket.socket(socket.AF_UNIX, kind) as opened:
                    opened.connect(path)
                    os._exit(2)

    assert os.waitpid(in_child(come), 0)[1] == 0


def test_random_bytes_on_the_ports_for_other_hosts_change_nothing() -> None:
    public, secret = zmq.curve_keypair()
    theirs, own = zmq.curve_keypair()
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        switchboard = Switchboard(
            Path(directory), server_secret=secret, server_public=public, client_public=theirs, host="127.0.0.1"
        )
        programs, keys = switchboard.programs, {"client_public": theirs, "client_secret": own}
        link = Link(context, 3, switchboard.program_url, server_public=public, **keys)
        with stranger() as other:
            answers = other.talk_to(listening()[0])
            link.send("hello")
            assert list(programs.receive(programs.wait(_WITHIN_S))) == [(3, "hello")]
            answers += other.talk_to(listening()[0])
        assert programs.send([3], "still here") == []
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        assert poller.poll(1000 * _WITHIN_S)
        assert link.receive() == "still here"
        assert list(programs.receive(programs.wait(0.1))) == []
        link.close()
        switchboard.close()
    # The answers say only that something listens, and that it requires CURVE.
    assert answers
    assert [each for each in answers if not _SAID_FIRST.match(each)] == []
    assert all(b"CURVE" in each for each in answers if len(each) > 12)
    assert any(b"CURVE" in each for each in answers)


def test_engines_stop_listening_once_they_have_met(session: Session) -> None:
    engines = [psutil.Process(row.pid) for row in session.status()]
    assert [each for engine in engines for each in engine.net_connections("inet") if each.status == "LISTEN"] == []


def test_only_the_user_can_read_the_rendezvous_files(session: Session) -> None:
    directory = session.engines.cluster.directory
    stores = list(directory.glob("store-*"))
    assert stores
    assert directory.stat().st_mode & 0o077 == 0

    def look() -> None:
        for path in (directory, *stores):
            with contextlib.suppress(PermissionError):
                os.stat(path / "x")
                os._exit(2)
            with contextlib.suppress(PermissionError), open(path):
                os._exit(3)

    assert os.waitpid(in_child(look), 0)[1] == 0


def test_a_store_of_the_program_finds_its_port_free(session: Session) -> None:
    text = """
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(address, port, 2, dist.get_rank() == 0)
store.set(f"from/{dist.get_rank()}", "here")
received = store.get(f"from/{1 - dist.get_rank()}").decode()
dist.barrier()
del store
"""
    run_cell(session, text, "store")
    assert session.user_ns["received"] == "here"


# -- a connection in the place of a replica --------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("user", [0, _NOBODY], ids=["the same user", "another user"])
def test_the_user_of_a_connections_other_end_is_known(family: socket.AddressFamily, user: int) -> None:
    with socket.socket(family) as listener:
        listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        listener.listen()
        listener.settimeout(_WITHIN_S)
        address = listener.getsockname()

        def come() -> None:
            with socket.socket(family) as opened:
                opened.connect(address)
                opened.recv(1)

        child = in_child(come, user)
        try:
            connected, _ = listener.accept()
            with connected:
                assert owner_of_peer(connected) == user
                connections = Connections([connected.fileno()])
                if user:
                    with pytest.raises(CollectiveError, match=r"another user \(uid 65534\) connected in the place of"):
                        connections.check_peers()
                else:
                    connections.check_peers()
                connections.close()
                connected.sendall(b".")
                os.waitpid(child, 0)
                child = 0
                processes.wait_until(lambda: owner_of_peer(connected) is None, _WITHIN_S)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def test_a_replica_reports_a_connection_of_another_user(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the replica itself, for which its own peers belong to another user afterwards."""
    run_cell(session, "import os as mine\nreally = mine.geteuid\nmine.geteuid = lambda: 4711", "another")
    with pytest.raises(ZeroDivisionError):
        run_cell(session, "1 / 0 if distnb.replica_id() else dist.barrier()", "ended")  # so that a new group must form
    with pytest.raises(distnb.errors.DistnbError, match=r"another user \(uid 0\) connected in the place of a repl"):
        run_cell(session, "dist.barrier()", "taken")
