"""The result of a scheduled closure, in the process that scheduled it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from distnb.errors import CannotTravelError

__all__ = ["RemoteValue"]

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class RemoteValue:
    """The result of a scheduled function, which `ClusterCoordinator.schedule` returns before it is available.

    It can be an argument of functions that are scheduled later. They run once it is available.

    Args:
        number: The number of the closure.
        name: The name of the function.
        wait: A function that waits until a condition is met.

    Attributes:
        state: "waiting", "running" (or next on a worker), "done", "failed" or "cancelled".
    """

    def __init__(self, number: int, name: str, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.number = number
        self.name = name
        self.state: State = "waiting"
        self.packed: Any = None
        self._wait = wait
        self._error: BaseException | None = None
        self._open: Callable[[Any], Any] | None = None
        self._value: Any = None

    @property
    def ended(self) -> bool:
        """True if the closure has ended."""
        return self.state not in ("waiting", "running")

    def fetch(self) -> Any:
        """Wait for the result, and return it.

        Raises:
            BaseException: The function's error, with the worker's own traceback; each time.
            ClosureCancelled: The closure was cancelled before it had a result.
            KeyboardInterrupt: The user interrupted, which cancels all scheduled closures.
        """
        self._wait(lambda: self.ended)
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._open is not None:
            self._value, self._open = self._open(self.packed), None
        return self._value

    def get(self) -> Any:
        """Return the same as `fetch`: a copy of the value in this process."""
        return self.fetch()

    def resolve(self, packed: Any, opener: Callable[[Any], Any]) -> None:
        """Accept the result of a closure that ended well. It is unpickled at its first use."""
        self.packed, self._open, self.state = packed, opener, "done"

    def fail(self, error: BaseException, state: Literal["failed", "cancelled"]) -> None:
        """Record that the closure will have no result."""
        self._error, self.state = error, state

    def __reduce__(self) -> Any:
        raise CannotTravelError(
            "A RemoteValue can only be sent as an argument of coordinator.schedule, or as a value that the scheduled "
            "function refers to. Elsewhere use its result: coordinator.fetch(...)."
        )

    def _repr_html_(self) -> str | None:
        if self.state != "done":
            return None
        from distnb.runtime.inspection.inspecting import inspect
        from distnb.views.value_model import ValueModel
        from distnb.widgets.value_views.value_html import value_html

        facts = {0: inspect(self.fetch())}
        return value_html(ValueModel(kind=f"RemoteValue of {self.name}", size=1, components=facts))

    def __repr__(self) -> str:
        return f"<RemoteValue of {self.name}: {self.state}>"
