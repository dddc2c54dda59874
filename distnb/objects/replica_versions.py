"""Versions of values in several packs: what each replica has made of an object, and the merge of all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from distnb.objects.merging import Merge
from distnb.objects.opening import is_lost, pairs_in
from distnb.objects.pack_tables import PackTable
from distnb.objects.packing import Packed
from distnb.objects.tracking import Tracker

__all__ = ["Copies", "copies_in", "merge_copies"]


class _Copy(NamedTuple):
    """An object of a pack as it arrived.

    Attributes:
        number_there: Its number at the other end.
        obj: The object. A class is this end's own.
        state: The attributes of a class as they arrived; None for another object.
    """

    number_there: int
    obj: Any
    state: dict[str, Any] | None


class Copies(NamedTuple):
    """The content of a pack as it arrived.

    Attributes:
        roots: The values by name.
        objects: The objects that this end knows, by their numbers here.
        failed: The error of each value that could not be opened, by name.
        new_classes: The classes that were created.
        referred: The objects behind references, which did not arrive.
    """

    roots: dict[str, Any]
    objects: dict[int, _Copy]
    failed: dict[str, Exception]
    new_classes: list[type]
    referred: list[Any]


def copies_in(tracker: Tracker, packed: Packed) -> Copies:
    """Return the content of a pack as it arrived."""
    opener = tracker.opening(packed, ())
    for name in packed.names:
        opener.load(name)
    table = PackTable(packed, opener.roots, opener)
    objects = table.objects
    states = {id(cls): state for _, cls, state in opener.held_classes}
    for name in opener.bound:
        tracker.side.user_ns.pop(name, None)
    opener.close()
    return Copies(
        roots={name: root[0] for name, root in zip(packed.names, opener.roots, strict=True)},
        objects={
            number: _Copy(table.number_at(place), objects[place], states.get(id(objects[place])))
            for place, number in pairs_in(packed)
            if place in objects and not is_lost(objects[place]) and tracker.has(number)
        },
        failed=opener.failed,
        new_classes=opener.new_classes,
        referred=opener.referred,
    )


def merge_copies(
    tracker: Tracker,
    names: Collection[str],
    copies: Sequence[Copies],
    sources: Mapping[int, Copies],
    substitutes: Mapping[int, Any],
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Merge values of which several packs contain versions. Return the values, and the errors, by name.

    The other ends no longer have equal values, so each value is sent again when it is next read.

    Args:
        tracker: The tracker that knows the objects.
        names: The names of the values.
        copies: The packs. An object is taken from the first pack that contains it.
        sources: The packs from which other objects are taken, by number.
        substitutes: Objects that replace others, by number.
    """
    counterparts, versions = dict[int, Any](), dict[int, Any]()
    taken = {id(obj): obj for each in copies for obj in each.referred}
    states: dict[type, dict[str, Any]] = {}
    chosen: dict[int, Any] = {}
    for each in copies:
        for number, (_, obj, state) in each.objects.items():
            source = sources.get(number, each)
            if state is not None and source is each:
                states.setdefault(obj, state)
            elif number in substitutes:
                taken[id(obj)] = substitutes[number]
            elif state is None:
                chosen.setdefault(number, source.objects[number].obj)
                versions[id(obj)] = chosen[number]
                counterparts[id(chosen[number])] = tracker.find(number)
    merge = Merge(counterparts, taken, versions)
    values = dict[str, Any]()
    failed = {name: error for each in copies for name, error in each.failed.items() if name in names}
    for name, root in ((name, root) for each in copies for name, root in each.roots.items()):
        if name in names and name not in values and name not in failed:
            try:
                values[name] = merge.merged(root)
                tracker.send_again((name,))
            except Exception as error:  # the user's classes may raise any error  # noqa: BLE001
                failed[name] = error
    merge.classes(states.items(), (cls for each in copies for cls in each.new_classes))
    for number, obj in chosen.items():
        if merge.has_merged(obj):
            tracker.put(number, merge.final(obj))
    return values, failed
