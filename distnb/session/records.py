"""Records of what the engines have, when a program has changed it there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from distnb.session.handles import HANDLES
from distnb.session.luggage import shape_of
from distnb.session.spaces import NotebookSpace
from distnb.wire.fingerprints import fingerprint
from distnb.wire.frozen import note_frozen
from distnb.wire.graph import Side
from distnb.wire.messages import ObjectId
from distnb.wire.twins import NOT_THERE

__all__ = ["put_back", "take_out"]


def take_out(space: NotebookSpace, side: Side, changed: set[ObjectId]) -> list[ObjectId]:
    """Forget the records of values that hold something that changed there; to be called before it changes here.

    Returns:
        The ids of those values that the engines had as they are here, for `put_back`. The notebook has changed the
        others, too, since they were sent: they are compared and sent again when they are read.
    """
    for identity in changed:
        space.twins.contents.pop(identity, None)
    current: list[ObjectId] = []
    for key, record in list(space.records.items()):
        if changed.isdisjoint(record.nodes):
            continue
        del space.records[key]
        value = space.twins.get(key) if isinstance(key, tuple) else NOT_THERE
        if not isinstance(key, tuple) or value is NOT_THERE or isinstance(value, HANDLES):
            continue
        with contextlib.suppress(Exception):  # something that cannot be pickled was put in since
            if fingerprint(value, side, space.twins, space.rules).matches(record):
                current.append(key)
    return current


def put_back(space: NotebookSpace, side: Side, keys: Iterable[ObjectId]) -> None:
    """Note that the engines have these values as they are here."""
    twins = space.twins
    for key in keys:
        value = twins.get(key)
        if value is NOT_THERE or isinstance(value, HANDLES):
            continue
        with contextlib.suppress(Exception):  # what came cannot be pickled again
            found = fingerprint(value, side, twins, space.rules)
            space.records[key] = replace(found, arrays={}, sources={}, owners=())
            note_frozen(found.nodes, side, twins, space.rules)
            for identity in found.nodes:
                node = twins.get(identity)
                if id(node) in found.arrays:
                    twins.contents[identity] = found.arrays[id(node)]
                    space.shapes[identity] = shape_of(node)
