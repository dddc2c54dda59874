"""The channel lets one key in, and nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import zmq

from distnb.wire import freight
from distnb.wire.channel import Link, Switchboard, beside, receive_from, send_to
from distnb.wire.messages import Hello

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


def read(board: Switchboard, timeout_ms: int) -> list[tuple[int, Any]]:
    return list(receive_from(board.program, board.harbour)) if board.program.poll(timeout_ms) else []


@contextmanager
def links(board: Switchboard, context: zmq.Context[Any], *tokens: str) -> Iterator[list[Link]]:
    """An engine's end for each token, connected."""
    found = []
    for engine, token in enumerate(tokens):
        passage = freight.connect(board.harbour.name, token, engine)
        found.append(Link(context, engine, board.program_url, passage=passage, **KEYS))
        found[-1].send("hello")
        assert read(board, 5000) == [(engine, "hello")]
    board.harbour.let_in()
    yield found
    for link in found:
        link.close()


def through_channel(link: Link) -> list[Any]:
    """The frames of the next message, as the socket brings them."""
    assert link.socket.poll(5000)
    return link.socket.recv_multipart()


def test_a_message_goes_there_and_back_by_the_engines_id(board: Switchboard, context: zmq.Context[Any]) -> None:
    link = Link(context, 5, board.program_url, **KEYS)
    link.send(Hello(5, os.getpid(), "here", "cpu:0"))
    ((engine, hello),) = read(board, 5000)
    assert (engine, hello.host) == (5, "here")
    send_to(board.program, (5,), {"array": np.arange(100_000)})
    assert link.socket.poll(5000)
    assert link.receive()["array"][-1] == 99_999
    assert link.receive() is None


def test_large_frames_go_around_the_sockets_both_ways(board: Switchboard, context: zmq.Context[Any]) -> None:
    array = np.arange(1_000_000)
    with links(board, context, board.harbour.token, board.harbour.token) as (first, second):
        send_to(board.program, (0, 1), {"array": array}, board.harbour)
        assert sum(map(len, through_channel(first))) < 1000
        assert second.socket.poll(5000)
        received = second.receive()["array"]
        assert np.array_equal(received, array)
        received += 1  # its own
        second.send({"back": received})
        received += 1  # what was sent stays as it was
        ((engine, message),) = read(board, 5000)
        assert engine == 1
        assert np.array_equal(message["back"], array + 1)


def test_who_shares_no_memory_gets_all_through_the_sockets(board: Switchboard, context: zmq.Context[Any]) -> None:
    array = np.arange(1_000_000)
    with links(board, context, board.harbour.token, "another token") as (near, far):
        send_to(board.program, (0, 1), {"array": array}, board.harbour)
        array += 1  # sent is sent
        for link in (near, far):
            assert link.socket.poll(5000)
            received = link.receive()["array"]
            assert np.array_equal(received, array - 1)
            link.send({"back": received})
            received += 5
            ((_, message),) = read(board, 5000)
            assert np.array_equal(message["back"], array - 1)
        send_to(board.program, (0, 1), {"array": array}, board.harbour)
        assert sum(map(len, through_channel(near))) < 1000
        assert sum(map(len, through_channel(far))) > array.nbytes


def test_messages_keep_their_order_whatever_way_their_frames_go(board: Switchboard, context: zmq.Context[Any]) -> None:
    sizes = [10, 100_000, 20, 1_000_000, 1, 3_000_000, 500_000]
    with links(board, context, board.harbour.token) as (link,):
        for size in sizes:
            send_to(board.program, (0,), np.ones(size, np.uint8), board.harbour)
        received = []
        while len(received) < len(sizes):
            assert link.socket.poll(5000)
            while (message := link.receive()) is not None:
                received.append(message.nbytes)
        assert received == sizes


def ways_to(board: Switchboard) -> dict[str, str]:
    """Where programs can be sent from, by other machines and by this one."""
    return {"tcp": board.program_url, "unix": beside(board.harbour.name)}


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_the_cluster_s_key_gets_through(board: Switchboard, context: zmq.Context[Any], way: str) -> None:
    link = Link(context, 1, ways_to(board)[way], **KEYS)
    link.send("hello")
    assert read(board, 5000) == [(1, "hello")]
    link.close()


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_another_key_gets_nothing_through(board: Switchboard, context: zmq.Context[Any], way: str) -> None:
    public, secret = zmq.curve_keypair()
    url = ways_to(board)[way]
    link = Link(context, 1, url, server_public=SERVER_PUBLIC, client_public=public, client_secret=secret)
    link.socket.linger = 0
    link.send("run this")
    assert read(board, 500) == []


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_client_without_curve_gets_nothing_through(board: Switchboard, context: zmq.Context[Any], way: str) -> None:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(ways_to(board)[way])
    with suppress(zmq.Again):  # refused before it could send
        socket.send(b"run this", zmq.NOBLOCK)
    assert read(board, 500) == []


def test_a_message_to_an_engine_that_is_not_there_is_not_lost_silently(board: Switchboard) -> None:
    assert send_to(board.program, (9,), "hello") == [9]


def test_it_listens_on_loopback_only(board: Switchboard) -> None:
    assert board.program_url.startswith("tcp://127.0.0.1:")
    assert board.control_url.startswith("tcp://127.0.0.1:")
