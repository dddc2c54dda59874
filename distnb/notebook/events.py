"""Who wants to know what happens on the engines: a small publish-subscribe hub."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["EventHub"]

Listener = Callable[[Any], None]


class EventHub:
    """Hands each event of `wire.messages` to every listener, in order, on the supervisor's thread."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` from now on. Returns the function that ends it.

        A listener must not block: the supervisor's thread, which ends hanging cells, calls it.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return lambda: self._drop(listener)

    def _drop(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

    def publish(self, event: Any) -> None:
        """Hand one event on. A listener that raises is reported on stderr, and the others still hear."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001
                # A view that fails must cost neither the training nor the supervisor.
                traceback.print_exc()
