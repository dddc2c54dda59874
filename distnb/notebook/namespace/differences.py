"""The search for objects of the notebook that the replicas have changed, in the same way or differently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from distnb.objects.code.definitions import class_state
from distnb.objects.digesting import Digester
from distnb.objects.replica_versions import Copies
from distnb.objects.tracking import Tracker

__all__ = ["changes_of"]

_MOST = 10_000


def changes_of(
    tracker: Tracker, copies: Mapping[int, Copies], names: Iterable[str]
) -> tuple[dict[int, Copies], dict[int, dict[int, int]]]:
    """Compare the replicas' versions of objects with each other, and with the notebook's.

    An object that only holds a changed object does not count as changed. An example: replica 0 appends to `a` in
    `outer = [a]`. Then `a` is changed by replica 0, and `outer` by none.

    Args:
        tracker: The notebook's objects.
        copies: The versions of each replica that has changed any.
        names: The names of the values in which the objects are.

    Returns:
        The versions of objects that some replicas changed in the same way, by the number in the notebook. And objects
        that replicas changed differently: the number on each of these replicas, by the number in the notebook. Both are
        empty if there are too many objects.
    """
    within = _within(tracker, names)
    arrived = dict.fromkeys(number for each in copies.values() for number in each.objects)
    here = {id(own): number for number in arrived if id(own := tracker.find(number)) in within}
    if len(here) > _MOST:
        return {}, {}
    known = {id(copy.obj): number for each in copies.values() for number, copy in each.objects.items()} | here
    alike: dict[int, Copies] = {}
    different: dict[int, dict[int, int]] = {}
    for number in here.values():
        versions = {replica: each.objects[number] for replica, each in copies.items() if number in each.objects}
        digests = {replica: _digest(tracker, known, one.obj, one.state) for replica, one in versions.items()}
        if len(set(digests.values())) == 1:
            continue
        own = tracker.find(number)
        before = _digest(tracker, known, own, class_state(own) if isinstance(own, type) else None)
        changed = {replica: digest for replica, digest in digests.items() if digest != before}
        if len(set(changed.values())) == 1:
            alike[number] = copies[min(changed)]
        else:
            different[number] = {replica: one.number_there for replica, one in versions.items()}
    return alike, different


def _within(tracker: Tracker, names: Iterable[str]) -> set[int]:
    """Return the `id()`s of the objects in the notebook's values. Other numbers belong to states of instances."""
    found, digester = set[int](), Digester(tracker.side)
    for name in names:
        digester.begin(name, tracker.root(name))
        with contextlib.suppress(Exception):  # the user's classes may raise any error
            digester.digest_of(tracker.root(name))
        found |= digester.memo.copy().keys()
    return found


def _digest(tracker: Tracker, known: Mapping[int, int], obj: Any, state: dict[str, Any] | None) -> bytes:
    """Return the digest of an object without the content of other numbered objects in it."""
    value = obj if state is None else state
    if isinstance(value, set | frozenset):  # arranged, since its order may differ between processes
        value = sorted(str(known.get(id(item)) or _digest(tracker, known, item, None)) for item in value)
    for fast in (True, False):
        digester = Digester(tracker.side)
        digester.persistent_id = lambda each: None if each is value else known.get(id(each))
        # Without a memo, equal strings and one string twice have the same digest. This fails if there is a cycle.
        digester.fast = fast
        try:
            return digester.digest_of(value)
        except Exception:  # the user's classes may raise any error  # noqa: BLE001
            continue
    return b""
