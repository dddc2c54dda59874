"""A cluster that makes the test's own process a notebook while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

import distnb
from distnb.notebook import compose as sessions
from distnb.notebook.session import Session
from tests.support.processes import wait_until

_WITHIN_S = 20.0


@contextlib.contextmanager
def started(n: int = 2, strategy: Callable[[], Any] = distnb.MirroredStrategy, **options: Any) -> Iterator[Session]:
    """Start a cluster with the names `distnb`, `torch` and `strategy`. New names are removed afterwards."""
    distnb.start(n, **options)
    session = sessions.require()
    before = dict(session.user_ns)
    try:
        session.user_ns.update(strategy=strategy(), torch=torch, distnb=distnb)
        yield session
    finally:
        distnb.stop()
        for name in set(session.user_ns) - set(before):
            del session.user_ns[name]
        session.user_ns.update(before)


def run_cell(session: Session, source: str, name: str) -> None:
    """Run a cell on the replicas of the notebook's strategy."""
    session.cells.run(source, session.user_ns["strategy"].spec, filename=name)


def pids_of(session: Session) -> set[int]:
    """Return the processes of a session: its engines, and the one from which they were forked."""
    template: Any = getattr(getattr(session.engines.owner, "_launcher", None), "_template", None)
    return {row.pid for row in session.status()} | ({template.pid} if template is not None else set())


def lose(session: Session, engine: int) -> None:
    """Kill an engine, and wait until the notebook knows."""
    os.kill(session.status()[engine].pid, signal.SIGKILL)
    wait_until(lambda: session.status()[engine].state != "idle", _WITHIN_S)
