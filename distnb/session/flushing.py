"""Waiting until every event that the engines have under way has come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

from distnb.session.events import EventHub
from distnb.session.supervisor import Supervisor
from distnb.wire.messages import Died, Flush, Flushed

__all__ = ["await_flush"]

_numbers = itertools.count(1)


def await_flush(supervisor: Supervisor, events: EventHub, engines: Iterable[int], timeout_s: float) -> bool:
    """Ask engines to send what they have to tell, and wait for their word that they did.

    Args:
        supervisor: Carries the orders.
        events: Where the answers are published.
        engines: Those that are asked; ones that have ended, or are stuck, are not waited for.
        timeout_s: The longest wait.

    Returns:
        Whether all answered.
    """
    number = next(_numbers)
    stuck = supervisor.stuck
    missing = {engine for engine in engines if engine in supervisor.hellos and engine not in stuck}
    all_here = threading.Event()

    def hear(event: Any) -> None:
        if (isinstance(event, Flushed) and event.number == number) or isinstance(event, Died):
            missing.discard(event.engine)
            if not missing:
                all_here.set()

    unsubscribe = events.subscribe(hear)
    try:
        for engine in tuple(missing):
            supervisor.tell(engine, Flush(number))
        return not missing or all_here.wait(timeout_s)
    finally:
        unsubscribe()
