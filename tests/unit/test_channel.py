"""The channel lets one key in, and nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import zmq

from distnb.errors import StartError
from distnb.wire.channel import Link, ProgramLink, Switchboard, UnixSocketLink
from distnb.wire.messages import Hello
from distnb.wire.unix_socket import connect

SERVER_PUBLIC, SERVER_SECRET = zmq.curve_keypair()
CLIENT_PUBLIC, CLIENT_SECRET = zmq.curve_keypair()


@pytest.fixture
def board() -> Iterator[Switchboard]:
    board = Switchboard(server_secret=SERVER_SECRET, server_public=SERVER_PUBLIC, client_public=CLIENT_PUBLIC)
    yield board
    board.close()


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


def read(board: Switchboard, timeout_s: float = 60) -> list[tuple[int, Any]]:
    return list(board.programs.receive(board.programs.wait(timeout_s)))


def take(link: ProgramLink) -> Any:
    """The next message at an engine's end, waited for."""
    poll = zmq.Poller()
    poll.register(link.fileno(), zmq.POLLIN)
    while (message := link.receive()) is None:
        assert poll.poll(60_000)
    return message


@contextmanager
def links(board: Switchboard, context: zmq.Context[Any], *near: bool) -> Iterator[list[ProgramLink]]:
    """The ends of engines of the notebook's host, and of others, connected."""
    found: list[ProgramLink] = []
    passages = []
    harbour = board.programs.harbour
    for engine, is_near in enumerate(near):
        passages.append(connect(harbour.name, harbour.token, engine) if is_near else None)
        passage = passages[-1]
        found.append(UnixSocketLink(passage) if passage else Link(context, engine, board.program_url, **KEYS))
        found[-1].send("hello")
    board.programs.meet(Hello(engine, 1, "here", "cpu", near=is_near) for engine, is_near in enumerate(near))
    hellos: list[tuple[int, Any]] = []
    while len(hellos) < len(near):
        hellos += read(board)
    assert sorted(hellos) == [(engine, "hello") for engine in range(len(near))]
    yield found
    for passage in passages:
        if passage is not None:
            passage.close()


@pytest.mark.parametrize("near", [True, False], ids=["of this host", "of another"])
def test_messages_go_there_and_back_by_the_engines_id_in_order(
    board: Switchboard, context: zmq.Context[Any], near: bool
) -> None:
    sizes = [10, 100_000, 20, 1_000_000, 1, 3_000_000]
    with links(board, context, near, near) as ends:
        for size in sizes:
            assert board.programs.send((0, 1), {"array": np.arange(size)}) == []
        for engine, end in enumerate(ends):
            for size in sizes:
                array = take(end)["array"]
                assert np.array_equal(array, np.arange(size))
                end.send({"back": array})
                array += 1  # sent is sent, and it can be written to
                ((sender, message),) = read(board)
                assert sender == engine
                assert np.array_equal(message["back"], np.arange(size))
            assert end.receive() is None


def test_engines_of_this_host_and_of_others_together(board: Switchboard, context: zmq.Context[Any]) -> None:
    with links(board, context, True, False) as ends:
        for number in range(50):
            assert board.programs.send((0, 1), number) == []
            assert [take(end) for end in ends] == [number, number]
            for end in ends:
                end.send(("back", number))
            replies: list[tuple[int, Any]] = []
            while len(replies) < len(ends):
                replies += read(board)
            assert sorted(replies) == [(0, ("back", number)), (1, ("back", number))]


def test_an_engine_that_ends_is_not_reached_any_more_and_another_takes_its_place(
    board: Switchboard, context: zmq.Context[Any]
) -> None:
    with links(board, context, True):
        pass
    assert read(board) == []
    assert board.programs.send((0,), "hello") == [0]
    with links(board, context, True) as (end,):
        assert board.programs.send((0,), "hello") == []
        assert take(end) == "hello"


def test_an_engine_that_is_not_recognised_is_an_error(board: Switchboard) -> None:
    stranger = connect(board.programs.harbour.name, "another token", 0)
    assert stranger is not None
    with pytest.raises(StartError, match="not recognised"):
        board.programs.meet([Hello(0, 1, "here", "cpu", near=True)])
    stranger.close()


def test_a_descriptor_that_is_watched_ends_the_waiting(board: Switchboard) -> None:
    reading, writing = os.pipe()
    board.programs.watch(reading)
    assert board.programs.wait(0) == []
    os.write(writing, b"x")
    assert board.programs.wait(60) == [reading]
    os.close(reading)
    os.close(writing)


def become_far(board: Switchboard) -> None:
    board.programs.meet([Hello(9, 1, "elsewhere", "cpu")])


def test_another_key_gets_nothing_through(board: Switchboard, context: zmq.Context[Any]) -> None:
    become_far(board)
    public, secret = zmq.curve_keypair()
    link = Link(context, 1, board.program_url, server_public=SERVER_PUBLIC, client_public=public, client_secret=secret)
    link.socket.linger = 0
    link.send("run this")
    assert read(board, 0.5) == []


def test_a_client_without_curve_gets_nothing_through(board: Switchboard, context: zmq.Context[Any]) -> None:
    become_far(board)
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(board.program_url)
    with suppress(zmq.Again):  # refused before it could send
        socket.send(b"run this", zmq.NOBLOCK)
    assert read(board, 0.5) == []


def test_a_message_to_an_engine_that_is_not_there_is_not_lost_silently(board: Switchboard) -> None:
    assert board.programs.send((9,), "hello") == [9]


def test_it_listens_on_loopback_only(board: Switchboard) -> None:
    assert board.program_url.startswith("tcp://127.0.0.1:")
    assert board.control_url.startswith("tcp://127.0.0.1:")
