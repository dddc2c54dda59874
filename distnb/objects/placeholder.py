"""Placeholders for objects that cannot be sent. Any use of a placeholder raises an error with the cure."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import threading
import types
from typing import Any, NoReturn

from distnb.errors import CannotTravelError, DistnbError

__all__ = ["LOCAL_PREFIX", "CURE_FOR_MODULES", "Placeholder", "cure_for", "is_unsendable", "label_of", "refusal"]

CURE_FOR_MODULES = (
    "install it where the engines run. If it is the notebook's own, start the engines with %distnb start --sync, which "
    "sends the notebook's folder; or add its folder to sys.path in a cell"
)
"""The cure for a module that a replica cannot import."""

_CURES: tuple[tuple[tuple[type, ...], str], ...] = (
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
        "make it inside the distributed cell, or turn it into a list",
    ),
    ((io.IOBase,), "open it inside the distributed cell, by its path"),
    ((threading.Condition, threading.Event, threading.Semaphore), "make it inside the distributed cell"),
    ((type(threading.Lock()), type(threading.RLock())), "make it inside the distributed cell"),
    ((socket.socket,), "connect inside the distributed cell"),
    ((threading.Thread, subprocess.Popen), "start it inside the distributed cell"),
    ((asyncio.AbstractEventLoop, asyncio.Future), "await it in the notebook, and use its result"),
    ((types.FrameType, types.TracebackType), "keep its text (traceback.format_exc()) instead"),
)
_UNSENDABLE = tuple(kind for kinds, _ in _CURES for kind in kinds)
_SENDABLE_IO = (io.BytesIO, io.StringIO)
_ANY_CURE = "make it inside the distributed cell, or keep it out of what the cell reads"


def is_unsendable(obj: Any) -> bool:
    """Return whether an object belongs to its process, even if its class supports pickling."""
    kind = type(obj)
    return issubclass(kind, _UNSENDABLE) and not issubclass(kind, _SENDABLE_IO)


def cure_for(obj: Any) -> str:
    """Return the cure for an object that cannot be sent."""
    if type(obj).__name__ == "KerasTensor":
        return "make the layers and their outputs within one `with strategy.scope():`; a keras.Input can be sent"
    return next((cure for kinds, cure in _CURES if issubclass(type(obj), kinds)), _ANY_CURE)


LOCAL_PREFIX = "_given_"
"""The prefix of the names under which the locals of a function are sent with a block in it."""


def label_of(name: str) -> str:
    """Return the label of a value in messages. "@1" names an argument, "%id" a class, "x#3" an old value of `x`."""
    if name[:1] in ("@", "%", ""):
        return {"@": "An argument of the call", "%": "A class", "": "A value"}[name[:1]]
    return f"`{name.partition('#')[0].removeprefix(LOCAL_PREFIX)}`"


def refusal(label: str, value: Any, culprit: Any, cure: str, why: object = None) -> str:
    """Return the message that a value cannot be sent: the culprit (the value or an object in it), why, and the cure."""
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    held = f"{'is' if culprit is value else 'holds'} {article} {kind}"
    reason = "" if why is None else f" ({type(why).__name__}: {why})" if isinstance(why, Exception) else f" ({why})"
    return f"{label or 'A value'} cannot be sent: it {held}{reason}. The cure: {cure}."


class Placeholder:
    """The placeholder of an object that could not be sent.

    Args:
        text: The message of the exception that any use raises: the cause and the cure.
        kind: The name of the exception's class in `distnb.errors`.
    """

    def __init__(self, text: str, kind: str = CannotTravelError.__name__) -> None:
        self.__dict__["_refusal"] = text, kind

    def refuse(self, *args: Any, **keywords: Any) -> NoReturn:
        """Raise the placeholder's exception."""
        from distnb import errors

        text, kind = self.__dict__["_refusal"]
        error: type[DistnbError] = getattr(errors, kind)
        raise error(text)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), keywords: Any = None) -> NoReturn:
        from distnb.values import structure

        leaves, _ = structure.flatten((args, keywords or {}))
        next(leaf for leaf in leaves if isinstance(leaf, Placeholder)).refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # code that looks up these attributes only inspects the object
        self.refuse()

    def __reduce__(self) -> Any:
        return Placeholder, self.__dict__["_refusal"]

    def __repr__(self) -> str:
        return f"<not here: {self.__dict__['_refusal'][0]}>"

    __hash__ = object.__hash__


_USES = """
call iter next enter exit aiter anext await getitem setitem delitem len contains bool float int
complex index eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod
rmod pow rpow matmul rmatmul and rand or ror xor rxor neg pos abs invert iadd isub imul itruediv
setattr delattr format array
"""

for _name in _USES.split():
    setattr(Placeholder, f"__{_name}__", Placeholder.refuse)
