"""Work that replica 0 does while the others wait, such as writing a file that all replicas then read."""

from __future__ import annotations

import builtins
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from distnb import errors
from distnb.collectives.group import announcements
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
    """Call `do` on replica 0 while the others wait until it is done.

    Replica 0 may call this function alone. The other replicas must not: without replica 0's call their wait fails.

    Args:
        name: The name of the work. Calls with one name between two collectives are counted, and a replica's n-th call
            waits for replica 0's n-th call.
        do: The work. It must not take part in collectives, because the other replicas do not.

    Returns:
        The result of `do` on replica 0, and None on the others.

    Raises:
        Exception: The error that `do` raised on replica 0. The other replicas raise an error of the same class, if it
            is Python's or distnb's, or else a ProgramError.
    """
    if this_process.replica is None and this_process.remote is None and choice.started_by_launcher():
        from distnb.runtime.spmd import join_from_env

        join_from_env()  # the script may not have made a strategy yet, so its replicas have no group
    process = this_process.replica
    if process is None or process.size == 1 or _here.acting:
        return do()
    group = process.group.process_group
    key = _key(announcements.place(group), name)
    if process.rank > 0:
        _raise_reported(announcements.await_announcement(group, key, 0, name))
        return None
    outcome = ""
    _here.acting = True
    try:
        return do()
    except Exception as error:
        outcome = json.dumps([type(error).__name__, str(error)])
        raise
    finally:
        _here.acting = False
        announcements.announce(group, key, outcome)


def _key(place: str, name: str) -> str:
    """Return the key of a call: its place in the program, its name, and the number of this name's call there."""
    global _place
    if place != _place:
        _place = place
        _calls.clear()
    _calls[name] += 1
    return f"{place}/{name}/{_calls[name]}"


def _raise_reported(outcome: str) -> None:
    """Raise replica 0's error, of the same class if that is Python's or distnb's. Do nothing if there was none."""
    if not outcome:
        return
    kind, text = json.loads(outcome)
    cls = getattr(builtins, kind, getattr(errors, kind, None))
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            error = cls(text)
        except TypeError:
            error = None
        if error is not None:
            raise error
    raise ProgramError(f"Replica 0 raised {kind}: {text}")
