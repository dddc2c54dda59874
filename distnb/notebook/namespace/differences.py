"""The search for objects of the notebook that the replicas have changed differently."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from distnb.objects.digesting import Digester
from distnb.objects.packing import Packed
from distnb.objects.tracking import Tracker

__all__ = ["differing"]

_MOST = 10_000


def differing(tracker: Tracker, packs: Mapping[int, Packed]) -> dict[int, dict[int, int]]:
    """Find the objects whose own content differs. An object that only holds such an object does not count.

    An example: if the replicas append different numbers to `a` in `outer = [a]`, then `a` is found and `outer` is not.

    Returns:
        The number of each such object on each replica, by its number in the notebook and by replica.
    """
    found: dict[int, dict[int, int]] = {}
    digests: dict[int, set[bytes]] = {}
    for replica, pack in packs.items():
        copies = tracker.copies(pack)
        if len(copies) > _MOST:
            return {}
        known = {id(obj): number for number, _, obj in copies}
        for number, there, obj in copies:
            digests.setdefault(number, set()).add(_Shallow(tracker, known, obj).digest)
            found.setdefault(number, {})[replica] = there
    return {number: given for number, given in found.items() if len(given) == len(packs) and len(digests[number]) > 1}


class _Shallow(Digester):
    """The digester of an object without the content of other numbered objects in it."""

    def __init__(self, tracker: Tracker, known: Mapping[int, int], obj: Any) -> None:
        self.persistent_id = lambda each: None if each is obj else known.get(id(each))
        super().__init__(tracker.side)
        self.digested_class = obj if isinstance(obj, type) else None
        self.digest = b""
        with contextlib.suppress(Exception):  # objects that cannot be digested count as equal
            self.digest = self.digest_of(obj)
