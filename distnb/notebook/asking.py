"""Questions to the engines' control threads, which answer while the main threads compute."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from distnb.notebook.events import EventHub
from distnb.notebook.supervisor import Supervisor
from distnb.wire.messages import Died, DumpStacks, Flush, Flushed, Stacks

__all__ = ["ask_stacks", "await_flush"]

_numbers = itertools.count(1)


def await_flush(supervisor: Supervisor, events: EventHub, engines: Iterable[int], timeout_s: float) -> bool:
    """Ask engines to send what they have to tell, and wait for their word that they did.

    Args:
        supervisor: Carries the orders.
        events: Where the answers are published.
        engines: Those that are asked; ones that are stuck, or end meanwhile, are not waited for.
        timeout_s: The longest wait.

    Returns:
        Whether all answered.
    """
    number = next(_numbers)
    asked = [engine for engine in engines if engine not in supervisor.stuck]

    def answers(event: Any) -> bool:
        return isinstance(event, Flushed) and event.number == number

    return _ask(supervisor, events, asked, Flush(number), answers, timeout_s)


def ask_stacks(supervisor: Supervisor, events: EventHub, engines: Iterable[int], timeout_s: float) -> dict[int, str]:
    """Where each engine's main thread is, as lines of a traceback; "" if it is idle.

    Returns:
        By engine. One whose native code holds Python's lock cannot answer, and is missing.
    """
    found: dict[int, str] = {}

    def answers(event: Any) -> bool:
        if isinstance(event, Stacks):
            found[event.engine] = event.text
        return isinstance(event, Stacks)

    _ask(supervisor, events, engines, DumpStacks(), answers, timeout_s)
    return found


def _ask(
    supervisor: Supervisor,
    events: EventHub,
    engines: Iterable[int],
    question: Any,
    answers: Callable[[Any], bool],
    timeout_s: float,
) -> bool:
    """Whether every engine that is up answered in time, or died meanwhile."""
    missing = {engine for engine in engines if engine in supervisor.hellos}
    all_here = threading.Event()

    def hear(event: Any) -> None:
        if isinstance(event, Died) or answers(event):
            missing.discard(event.engine)
            if not missing:
                all_here.set()

    unsubscribe = events.subscribe(hear)
    try:
        for engine in tuple(missing):
            supervisor.tell(engine, question)
        return not missing or all_here.wait(timeout_s)
    finally:
        unsubscribe()
