"""Work that replica 0 does while the others wait, such as writing a file that all read next."""

from __future__ import annotations

import builtins
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from distnb import errors
from distnb.errors import ProgramError
from distnb.runtime import choice
from distnb.runtime.this_process import this_process

__all__ = ["chief_first"]

T = TypeVar("T")

_calls: Counter[str] = Counter()
_place = ""


class _ChiefCall(threading.local):
    acting = False


_here = _ChiefCall()


def chief_first(name: str, do: Callable[[], T]) -> T | None:
    """Have replica 0 do something, and the others wait until it is done; what it raises, they raise.

    Replica 0 may call it alone. The others must not: they would wait in vain, which is an error.

    Args:
        name: What is done. Calls of one name between two collectives are counted: each waits for the chief's call of
            that number.
        do: Does it, on replica 0. It must not take part in collectives, since the others do not.

    Returns:
        What `do` returned; None on the others.
    """
    if this_process.replica is None and this_process.remote is None and choice.started_by_launcher():
        from distnb.runtime.spmd import join_from_env

        join_from_env()  # a script's replicas may not have met yet
    process = this_process.replica
    if process is None or process.size == 1 or _here.acting:
        return do()
    group, key = process.group, _key(process.group.place(), name)
    if process.rank > 0:
        _raise_told(group.await_announcement(key, 0, name))
        return None
    told = ""
    _here.acting = True
    try:
        return do()
    except Exception as error:
        told = json.dumps([type(error).__name__, str(error)])
        raise
    finally:
        _here.acting = False
        group.announce(key, told)


def _key(place: str, name: str) -> str:
    """Name a call: where it is in the program, and which one of its name there."""
    global _place
    if place != _place:
        _place = place
        _calls.clear()
    _calls[name] += 1
    return f"{place}/{name}/{_calls[name]}"


def _raise_told(told: str) -> None:
    """Raise the chief's error, as one of its class where that is Python's or ours."""
    if not told:
        return
    kind, text = json.loads(told)
    cls = getattr(builtins, kind, getattr(errors, kind, None))
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            error = cls(text)
        except TypeError:
            error = None
        if error is not None:
            raise error
    raise ProgramError(f"Replica 0 raised {kind}: {text}")
