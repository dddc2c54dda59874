"""The channel accepts one key and no other."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from distnb.errors import StartError
from distnb.wire.channel import Link, ProgramLink, Switchboard
from distnb.wire.control_channel import ControlChannel, ControlLink
from distnb.wire.messages import Hello
from distnb.wire.unix_socket import UnixSocket, connect

SERVER_PUBLIC, SERVER_SECRET = zmq.curve_keypair()
CLIENT_PUBLIC, CLIENT_SECRET = zmq.curve_keypair()


@pytest.fixture
def near(request: pytest.FixtureRequest) -> bool:
    """Return whether the engines are on the notebook's host."""
    return bool(getattr(request, "param", True))


@pytest.fixture
def switchboard(near: bool) -> Iterator[Switchboard]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is too deep for a socket's path
        switchboard = Switchboard(
            Path(directory),
            server_secret=SERVER_SECRET,
            server_public=SERVER_PUBLIC,
            client_public=CLIENT_PUBLIC,
            host=None if near else "127.0.0.1",
        )
        yield switchboard
        switchboard.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


KEYS: dict[str, Any] = {
    "server_public": SERVER_PUBLIC,
    "client_public": CLIENT_PUBLIC,
    "client_secret": CLIENT_SECRET,
}


def read(switchboard: Switchboard, timeout_s: float = 60) -> list[tuple[int, Any]]:
    return list(switchboard.programs.receive(switchboard.programs.wait(timeout_s)))


def take(link: ProgramLink) -> Any:
    """Wait for the next message at an engine's end."""
    poll = zmq.Poller()
    poll.register(link.fileno(), zmq.POLLIN)
    while (message := link.receive()) is None:
        assert poll.poll(60_000)
    return message


@contextmanager
def links(switchboard: Switchboard, context: zmq.Context[Any], engines: int) -> Iterator[list[ProgramLink]]:
    """Return the connected ends of engines."""
    found: list[ProgramLink] = []
    listener = switchboard.programs.listener
    for engine in range(engines):
        if listener is not None:
            found.append(connect(listener.path, engine))
        else:
            found.append(Link(context, engine, switchboard.program_url, **KEYS))
        found[-1].send("hello")
    switchboard.programs.meet(Hello(engine, 1, "here") for engine in range(engines))
    hellos: list[tuple[int, Any]] = []
    while len(hellos) < engines:
        hellos += read(switchboard)
    assert sorted(hellos) == [(engine, "hello") for engine in range(engines)]
    yield found
    for link in found:
        if isinstance(link, UnixSocket):
            link.close()


@pytest.mark.parametrize("near", [True, False], ids=["of this host", "of another"], indirect=True)
def test_messages_travel_both_ways_in_order_by_engine_id(switchboard: Switchboard, context: zmq.Context[Any]) -> None:
    sizes = [10, 100_000, 20, 1_000_000, 1, 3_000_000]
    with links(switchboard, context, 2) as ends:
        for size in sizes:
            sent = np.arange(size)
            assert switchboard.programs.send((0, 1), {"array": sent}) == []
            sent += 1  # after sending, it may be changed
        for engine, end in enumerate(ends):
            for size in sizes:
                array = take(end)["array"]
                assert np.array_equal(array, np.arange(size))
                end.send({"back": array})
                array += 1  # after sending, it may be changed
                ((sender, message),) = read(switchboard)
                assert sender == engine
                assert np.array_equal(message["back"], np.arange(size))
            assert end.receive() is None


def test_an_ended_engine_is_unreachable_until_it_is_replaced(
    switchboard: Switchboard, context: zmq.Context[Any]
) -> None:
    with links(switchboard, context, 1):
        pass
    assert read(switchboard) == []
    assert switchboard.programs.send((0,), "hello") == [0]
    with links(switchboard, context, 1) as (end,):
        assert switchboard.programs.send((0,), "hello") == []
        assert take(end) == "hello"


def test_an_engine_that_does_not_connect_is_an_error(switchboard: Switchboard) -> None:
    with pytest.raises(StartError, match="Engine 0 did not connect to the notebook"):
        switchboard.programs.meet([Hello(0, 1, "here")])


def test_a_watched_descriptor_ends_the_wait(switchboard: Switchboard) -> None:
    reading, writing = os.pipe()
    switchboard.programs.watch(reading)
    assert list(switchboard.programs.wait(0)) == []
    os.write(writing, b"x")
    assert list(switchboard.programs.wait(60)) == [reading]
    os.close(reading)
    os.close(writing)


def test_only_the_awaited_engine_ends_a_wait_for_one(switchboard: Switchboard, context: zmq.Context[Any]) -> None:
    reading, writing = os.pipe()
    switchboard.programs.watch(reading)
    with links(switchboard, context, 2) as (first, second):
        first.send("first")
        assert not switchboard.programs.await_one(1, 0.01)
        second.send("second")
        assert switchboard.programs.await_one(1, 60)
        assert sorted(read(switchboard)) == [(0, "first"), (1, "second")]
        assert not switchboard.programs.await_one(1, 0.01)
        os.write(writing, b"x")
        assert switchboard.programs.await_one(1, 60)
    os.close(reading)
    os.close(writing)


far = pytest.mark.parametrize("near", [False], ids=["of another"], indirect=True)


@far
def test_a_client_with_a_wrong_key_cannot_send(switchboard: Switchboard, context: zmq.Context[Any]) -> None:
    public, secret = zmq.curve_keypair()
    link = Link(
        context, 1, switchboard.program_url, server_public=SERVER_PUBLIC, client_public=public, client_secret=secret
    )
    link.socket.linger = 0
    link.send("run this")
    assert read(switchboard, 0.5) == []


@far
def test_a_client_without_curve_cannot_send(switchboard: Switchboard, context: zmq.Context[Any]) -> None:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(switchboard.program_url)
    with suppress(zmq.Again):  # refused before it could send
        socket.send(b"run this", zmq.NOBLOCK)
    assert read(switchboard, 0.5) == []


def test_an_old_connection_that_comes_again_does_not_replace_the_new_one(
    switchboard: Switchboard, context: zmq.Context[Any]
) -> None:
    def events() -> Iterator[Any]:
        poll = zmq.Poller()
        poll.register(switchboard.control, zmq.POLLIN)
        while poll.poll(60_000):
            yield from control.receive()

    control, hello = ControlChannel(switchboard.control), Hello(3, 1, "here")
    received = events()
    new = ControlLink(context, 3, switchboard.control_url, **KEYS)
    new.send([hello])
    assert next(received) == (3, [hello])
    old = ControlLink(context, 3, switchboard.control_url, **KEYS, monitored=True)
    assert old.monitor is not None
    assert old.monitor.socket.poll(60_000)
    old.send(["what the last notebook did not read"])
    old.close()
    last = Link(context, 4, switchboard.control_url, **KEYS)  # by its message all that the old one did has arrived
    last.send([Hello(4, 1, "here")])
    assert next(received)[0] == 4
    new.send(["event"])
    assert next(received) == (3, ["event"])
    assert control.send(3, "order")
    assert new.socket.poll(60_000)
    assert new.receive() == "order"


def test_a_message_to_a_missing_engine_is_an_error(switchboard: Switchboard) -> None:
    assert switchboard.programs.send((9,), "hello") == [9]


def test_a_local_channel_listens_in_the_private_directory_only(switchboard: Switchboard) -> None:
    assert switchboard.programs.listener is not None
    assert switchboard.program_url == ""
    paths = [Path(switchboard.programs.listener.path), Path(switchboard.control_url.removeprefix("ipc://"))]
    assert all(stat.S_ISSOCK(path.stat().st_mode) for path in paths)
    assert {path.parent.stat().st_mode & 0o077 for path in paths} == {0}


@far
def test_a_channel_for_other_hosts_listens_at_the_given_address(switchboard: Switchboard) -> None:
    assert switchboard.programs.listener is None
    assert switchboard.program_url.startswith("tcp://127.0.0.1:")
    assert switchboard.control_url.startswith("tcp://127.0.0.1:")
