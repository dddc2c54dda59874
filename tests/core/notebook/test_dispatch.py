"""A program whose message does not reach an engine is not waited for."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from distnb.notebook.programs import dispatch
from distnb.notebook.programs.dispatch import Dispatch
from distnb.notebook.programs.supervisor import EventHub
from distnb.wire.channel import Programs
from distnb.wire.messages import Died, Reply


class Supervisor:
    """The part of the supervisor that a dispatch uses, with a record of its reports."""

    def __init__(self) -> None:
        self.lost_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.stuck: dict[int, int] = {}
        self.events = EventHub()
        self.lost: queue.SimpleQueue[Died] = queue.SimpleQueue()
        self.quiet: dict[int, Any] = {}
        self.reported: list[tuple[int, str]] = []

    def program_began(self, program: int, engines: tuple[int, ...]) -> None:
        pass

    def replied(self, engine: int, program: int) -> None:
        pass

    def failed(self, engine: int, program: int, summary: str) -> None:
        self.reported.append((engine, summary))


class Reachable(Programs):
    """Two engines, of which only engine 0 is reachable and replies."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[tuple[int, Any]] = []
        self.on_send: Any = lambda: None

    def send(self, peers: Any, message: Any) -> list[int]:
        self.on_send()
        self.replies = [(0, Reply(program=message, status="ok"))]
        return [1]

    def wait(self, timeout_s: float | None = None) -> list[int]:
        return super().wait(0.01)

    def receive(self, readable: Any) -> Iterator[tuple[int, Any]]:
        while self.replies:
            yield self.replies.pop()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Dispatch, Reachable, Supervisor]]:
    monkeypatch.setattr(dispatch, "_LATE_S", 0.1)
    programs, supervisor = Reachable(), Supervisor()
    made = Dispatch(programs, supervisor)  # type: ignore[arg-type]
    yield made, programs, supervisor
    made.close()
    programs.close()
    os.close(supervisor.lost_fd)


def test_an_unreachable_live_engine_ends_the_program(
    made: tuple[Dispatch, Reachable, Supervisor],
) -> None:
    one, _, supervisor = made
    outcome = one.post(1, (0, 1), 1)
    one.wait(outcome)
    assert outcome.replies.keys() == {0}
    assert "could not be reached" in outcome.died[1]
    assert "%distnb restart 1)" in outcome.died[1]
    assert supervisor.reported == [(1, outcome.died[1])]


def test_the_end_of_an_engine_that_just_died_is_reported(made: tuple[Dispatch, Reachable, Supervisor]) -> None:
    one, programs, supervisor = made

    def die() -> None:
        supervisor.lost.put(Died(1, 4711, "was killed by SIGKILL"))
        os.eventfd_write(supervisor.lost_fd, 1)

    programs.on_send = die
    outcome = one.post(1, (0, 1), 1)
    one.wait(outcome)
    assert outcome.died == {1: "was killed by SIGKILL"}
    assert supervisor.reported == []
