"""The result of a call that nobody waits for yet: `RunOptions(wait=False)`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from distnb.notebook.handles.computing import special_methods
from distnb.values.structure import map_structure
from distnb.wire.messages import ObjectId

__all__ = ["BesideCall", "PendingCall", "Unsettled", "itself", "resolve"]

# Calls under way; more would only fill queues. Many are waited for at once: that sends what waits to leave together.
_MOST_UNSETTLED, _FEW_UNSETTLED = 1000, 900


class PendingCall:
    """Stands for a result that is still on its way; using it in any way waits for it, and raises what went wrong."""

    __slots__ = ("_error", "_finish", "_value")

    def __init__(self, finish: Callable[[Callable[[Any], None]], Any]) -> None:
        """`finish` waits for the result, gives it to its argument to be kept, and returns it."""
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
    """What is pickled is replaced by what it stands for."""
    return value


def _call(pending: PendingCall, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*map(resolve, args))


def _forwarded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: _call(self, function, (self, *args))


# What Python looks for in the class: a name of `operator`, or of a builtin function, is its special method's.
for _name, _method in special_methods(_call).items():
    setattr(PendingCall, _name, _method)
for _name in ["getitem", "setitem", "contains", "eq", "ne", "lt", "le", "gt", "ge", "index"]:
    setattr(PendingCall, f"__{_name}__", _forwarded(getattr(operator, _name)))
for _builtin in (iter, len, float, int, complex, hash, format):
    setattr(PendingCall, f"__{_builtin.__name__}__", _forwarded(_builtin))


def resolve(value: Any) -> Any:
    """The value itself, once it is there, or what the call raised; anything else is returned as it is."""
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


def _was_told(value: PendingCall) -> bool:
    """Whether a use of the result has raised already what went wrong: once is enough."""
    return object.__getattribute__(value, "_error") is not None


class BesideCall:
    """A call that is sent once the replicas have begun with the next program: they need it later than that.

    Args:
        send: Sends it.
        changes: The ids of engine objects that it changes.

    Attributes:
        waits: It is not needed soon: it is sent before a program that reads what it changes, and not beside others.
    """

    def __init__(self, send: Callable[[], PendingCall], changes: set[ObjectId]) -> None:
        self._send = send
        self.changes = changes
        self.waits = False
        self._sent: PendingCall | None = None
        self._error: Exception | None = None

    @property
    def is_sent(self) -> bool:
        """Whether it was sent, or could not be."""
        return self._sent is not None or self._error is not None

    def send(self) -> None:
        """Send it, unless that was done. What keeps it from being sent is told where its result is wanted."""
        if not self.is_sent:
            try:
                self._sent = self._send()
            except Exception as error:  # noqa: BLE001
                self._error = error

    def result(self) -> Any:
        """Wait for its result.

        Raises:
            BaseException: What it raised on the replicas, or kept it from being sent.
        """
        self.send()
        if self._error is not None:
            raise self._error
        return resolve(self._sent)


class Unsettled:
    """The calls that nobody has waited for yet, by their programs, in the order in which they were sent."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[PendingCall, bool]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, program: int, call: PendingCall, *, own_error: bool) -> None:
        """A call was sent. `own_error`: what it raises is told even if nobody uses its result."""
        self._calls[program] = call, own_error

    def discard(self, program: int) -> None:
        """A call went well, and its result is there: whoever wants that has it."""
        self._calls.pop(program, None)

    def keep_few(self) -> None:
        """Wait for the oldest of them, where they have become too many; raises what one of them raised."""
        if len(self._calls) > _MOST_UNSETTLED:
            while len(self._calls) > _FEW_UNSETTLED:
                resolve(self._calls.pop(next(iter(self._calls)))[0])

    def wait(self) -> None:
        """Wait for all of them; what they raise is told where their results are used, or when they are settled."""
        for call, _ in list(self._calls.values()):
            with contextlib.suppress(Exception):
                resolve(call)

    def settle(self) -> None:
        """Wait for all of them; raises what the first that failed did, unless a use of its result has done so."""
        calls, self._calls = self._calls, {}
        for call, own_error in calls.values():
            if not _was_told(call):
                with contextlib.nullcontext() if own_error else contextlib.suppress(Exception):
                    resolve(call)
