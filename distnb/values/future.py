"""The result of a call that may still be running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Future"]


class Future:
    """The result of `strategy.run` with `RunOptions(wait=False)`.

    In a distributed cell and in a script, the call has ended when `run` returns, and its error was raised there.

    Args:
        finish: Waits for the result, calls its argument with it, and returns it.

    Example:
        >>> import distnb
        >>> strategy = distnb.OneDeviceStrategy("cpu:0")
        >>> strategy.run(lambda: 3, options=distnb.RunOptions(wait=False)).result()
        3
    """

    __slots__ = ("_error", "_finish", "_value")

    def __init__(self, finish: Callable[[Callable[[Any], None]], Any]) -> None:
        self._finish: Callable[[Callable[[Any], None]], Any] | None = finish
        self._error: BaseException | None = None
        self._value: Any = None

    @classmethod
    def of(cls, value: Any) -> Future:
        """Return the future of a call that has returned a value."""
        future = cls(lambda keep: value)
        future._keep(value)
        return future

    @property
    def has_raised(self) -> bool:
        """True if `result` has raised the call's error."""
        return self._error is not None

    def result(self) -> Any:
        """Wait for the call, and return its result.

        Raises:
            BaseException: The call's error, each time; KeyboardInterrupt if the user ended the wait.
        """
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            try:
                self._finish(self._keep)
            except Exception as error:
                self._error = error
                raise
        return self._value

    def _keep(self, value: Any) -> None:
        self._value, self._finish = value, None

    def __reduce__(self) -> Any:
        return Future.of, (self.result(),)
