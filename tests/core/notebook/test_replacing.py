"""Engines replaced while they die, while they compute, and after partial failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import distnb
from distnb.errors import EngineDied, NoClusterError, OptionError
from distnb.notebook import compose as sessions
from distnb.notebook.front_end import FrontEnd
from distnb.notebook.session import Session
from tests.support.processes import OF_MODULE
from tests.support.sessions import lose, pids_of, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with started() as session:
        yield session


@pytest.fixture(autouse=True)
def _module_owns_the_engines(session: Session) -> Iterator[None]:
    yield
    OF_MODULE.update(pids_of(session) if session.alive else ())


def replicas() -> list[int]:
    found: Any = distnb.MirroredStrategy().run(distnb.replica_id)
    return [int(each) for each in getattr(found, "values", [found])]  # with a single replica, a plain number


def test_an_engine_may_die_while_it_is_replaced(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    replacing, handle_end, forget = threading.Event(), session.namespace.engine_died, session._supervisor.forget

    def handle_late(engine: int) -> None:
        assert replacing.wait(60.0)  # the thread that handles an end is late on a busy machine
        handle_end(engine)

    def replace(engines: Sequence[int]) -> None:
        forget(engines)
        replacing.set()

    monkeypatch.setattr(session.namespace, "engine_died", handle_late)
    monkeypatch.setattr(session._supervisor, "forget", replace)
    lose(session, 1)
    assert session.flush_events(timeout_s=30), "an ended engine was waited for"
    session.restart([1])
    assert [row.state for row in session.status()] == ["idle", "idle"]
    assert replicas() == [0, 1]


def test_an_engine_with_pending_calls_can_be_replaced(session: Session) -> None:
    def never_ends() -> None:
        import time

        while True:
            time.sleep(0.01)

    pending: Any = distnb.MirroredStrategy().run(never_ends, options=distnb.RunOptions(wait=False))
    session.restart([1])
    with pytest.raises(EngineDied, match="was ended by a restart"):
        session.calls.finish()
    del pending
    assert replicas() == [0, 1]


def test_an_interrupted_replacement_can_be_repeated(session: Session) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.restart([1], on_progress=interrupt)
    assert session.status()[1].state != "idle"
    assert replicas() == [0]
    assert session.restart(missing=True) == (1,)
    assert replicas() == [0, 1]


def test_a_cluster_can_be_stopped_by_its_own_method(session: Session) -> None:
    received: list[Session | None] = []
    sessions.attach(FrontEnd(follow=received.append))
    try:
        session.stop()
        session.stop()  # again: nothing happens
        assert sessions.current() is None
        with pytest.raises(NoClusterError, match="No cluster is running"):
            sessions.require()
        with pytest.raises(OptionError, match="-1"):  # and not the error for a running cluster
            distnb.start(-1)
        assert received == [session, None]
    finally:
        sessions.attach(FrontEnd())
