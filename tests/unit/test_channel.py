"""The channel lets one key in, and nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from distnb.wire.channel import Link, Switchboard, receive_from, send_to
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


def read(board: Switchboard, timeout_ms: int) -> list[tuple[int, Any]]:
    return list(receive_from(board.program)) if board.program.poll(timeout_ms) else []


def test_a_message_goes_there_and_back_by_the_engines_id(board: Switchboard, context: zmq.Context[Any]) -> None:
    keys = {"server_public": SERVER_PUBLIC, "client_public": CLIENT_PUBLIC, "client_secret": CLIENT_SECRET}
    link = Link(context, 5, board.program_url, **keys)
    link.send(Hello(5, os.getpid(), "here", "cpu:0"))
    ((engine, hello),) = read(board, 5000)
    assert (engine, hello.host) == (5, "here")
    send_to(board.program, (5,), {"array": np.arange(100_000)})
    assert link.socket.poll(5000)
    assert link.receive()["array"][-1] == 99_999
    assert link.receive() is None


def test_another_key_gets_nothing_through(board: Switchboard, context: zmq.Context[Any]) -> None:
    public, secret = zmq.curve_keypair()
    link = Link(context, 1, board.program_url, server_public=SERVER_PUBLIC, client_public=public, client_secret=secret)
    link.socket.linger = 0
    link.send("run this")
    assert read(board, 500) == []


def test_a_client_without_curve_gets_nothing_through(board: Switchboard, context: zmq.Context[Any]) -> None:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(board.program_url)
    socket.send(b"run this")
    assert read(board, 500) == []


def test_a_message_to_an_engine_that_is_not_there_is_not_lost_silently(board: Switchboard) -> None:
    assert send_to(board.program, (9,), "hello") == [9]


def test_it_listens_on_loopback_only(board: Switchboard) -> None:
    assert board.program_url.startswith("tcp://127.0.0.1:")
    assert board.control_url.startswith("tcp://127.0.0.1:")
