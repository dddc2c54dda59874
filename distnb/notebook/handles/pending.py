"""Pending results of calls that were sent with `RunOptions(wait=False)`, and calls that are sent later."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from distnb.notebook.handles.computing import special_methods
from distnb.values.structure import map_structure
from distnb.wire.messages import ObjectId

__all__ = ["DeferredCall", "PendingCall", "PendingCalls", "itself", "resolve"]

# More calls under way would only fill queues. The oldest hundred are awaited at once, and the queues stay full.
_MOST_PENDING, _FEW_PENDING = 1000, 900


class PendingCall:
    """The pending result of a call. Any use of it waits for the result, or raises the call's error."""

    __slots__ = ("_error", "_finish", "_value")

    def __init__(self, finish: Callable[[Callable[[Any], None]], Any]) -> None:
        """Create the pending result. `finish(keep)` waits for the result, calls `keep` with it, and returns it."""
        object.__setattr__(self, "_finish", finish)
        object.__setattr__(self, "_error", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(resolve(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(resolve(self), name, value)

    def __repr__(self) -> str:
        return repr(resolve(self))

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map_structure(resolve, args), **map_structure(resolve, kwargs or {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return resolve(self)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return itself, (resolve(self),)


def itself(value: Any) -> Any:
    """Return the value unchanged. A representative is pickled as a call of this function with its object."""
    return value


def _call(pending: PendingCall, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*map(resolve, args))


def _forwarded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: _call(self, function, (self, *args))


# Python looks for special methods in the class. Each is named as its function in `operator` or its builtin function.
for _name, _method in special_methods(_call).items():
    setattr(PendingCall, _name, _method)
for _name in ["getitem", "setitem", "contains", "eq", "ne", "lt", "le", "gt", "ge", "index"]:
    setattr(PendingCall, f"__{_name}__", _forwarded(getattr(operator, _name)))
for _builtin in (iter, len, float, int, complex, hash, format):
    setattr(PendingCall, f"__{_builtin.__name__}__", _forwarded(_builtin))


def resolve(value: Any) -> Any:
    """Wait for a pending result and return it, or raise the call's error. Return any other value unchanged."""
    if type(value) is not PendingCall:
        return value
    get = object.__getattribute__
    try:
        return get(value, "_value")
    except AttributeError:
        error = get(value, "_error")
    if error is not None:
        raise error
    try:
        return get(value, "_finish")(partial(object.__setattr__, value, "_value"))
    except Exception as error:
        object.__setattr__(value, "_error", error)
        raise


def _is_reported(value: PendingCall) -> bool:
    """Return whether a use of the result has raised the call's error already, so that it need not be raised again."""
    return object.__getattribute__(value, "_error") is not None


class DeferredCall:
    """A call that is sent after the next program. It runs while the notebook handles the result of that program.

    Args:
        send: Sends the call.
        changes: The ids of the engine objects that the call changes.

    Attributes:
        urgent: Whether to send the call after the next call. If False, it is sent only before a program that reads the
            objects that it changes.
    """

    def __init__(self, send: Callable[[], PendingCall], changes: set[ObjectId]) -> None:
        self._send = send
        self.changes = changes
        self.urgent = True
        self._sent: PendingCall | None = None
        self._error: Exception | None = None

    @property
    def is_sent(self) -> bool:
        """True if the call was sent, or if an error prevented that."""
        return self._sent is not None or self._error is not None

    def send(self) -> None:
        """Send the call if it was not sent before. If an error prevents this, `result` raises the error."""
        if not self.is_sent:
            try:
                self._sent = self._send()
            except Exception as error:  # noqa: BLE001
                self._error = error

    def result(self) -> Any:
        """Wait for the result and return it.

        Raises:
            BaseException: The error of the replicas, or an error that prevented the call from being sent.
        """
        self.send()
        if self._error is not None:
            raise self._error
        return resolve(self._sent)


class PendingCalls:
    """The calls that have been sent and not awaited, by their programs, in order."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[PendingCall, bool]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, program: int, call: PendingCall, *, users: bool) -> None:
        """Add a call that was sent. The error of a `users` call is raised even if its result is never used."""
        self._calls[program] = call, users

    def discard(self, program: int) -> None:
        """Remove a call that succeeded and whose result has arrived."""
        self._calls.pop(program, None)

    def keep_few(self) -> None:
        """Wait for the oldest calls if there are too many, and raise the error of one that failed."""
        if len(self._calls) > _MOST_PENDING:
            while len(self._calls) > _FEW_PENDING:
                resolve(self._calls.pop(next(iter(self._calls)))[0])

    def wait(self) -> None:
        """Wait for all calls. Their errors are raised by a use of their results, or by `finish`."""
        for call, _ in list(self._calls.values()):
            with contextlib.suppress(Exception):
                resolve(call)

    def finish(self) -> None:
        """Wait for all calls. Raise the error of the first that failed, unless a use of its result has raised it."""
        calls, self._calls = self._calls, {}
        for call, users in calls.values():
            if not _is_reported(call):
                with contextlib.nullcontext() if users else contextlib.suppress(Exception):
                    resolve(call)
