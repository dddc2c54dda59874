"""What a program reads, as it is collected for a delivery."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distnb.wire.fingerprints import Fingerprint
from distnb.wire.immutables import is_plain
from distnb.wire.messages import ObjectId

__all__ = ["Luggage", "Root", "is_simple_code", "made_for_call", "objects_in", "shape_of", "tuples_of_call"]

_DESCRIPTORS = (property, classmethod, staticmethod, types.MemberDescriptorType)
_CLASS_FURNITURE = frozenset({"__dict__", "__weakref__", "__slotnames__", "__annotations__", "_abc_impl"})


@dataclass
class Root:
    """A value that a program reads.

    Attributes:
        key: Its id, or "name:…" while it has none.
        found: Its fingerprint.
        changed: The engines do not have it as it is.
    """

    key: ObjectId | str
    label: str
    value: Any
    found: Fingerprint
    changed: bool


@dataclass
class Luggage:
    """What a program reads, collected name by name."""

    bindings: dict[str, Any] = field(default_factory=dict)
    roots: list[Root] = field(default_factory=list)
    handles: dict[ObjectId, None] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)
    watch: dict[ObjectId, None] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)

    def copy(self) -> Luggage:
        """What has been collected so far."""
        return Luggage(dict(self.bindings), list(self.roots), dict(self.handles))


def made_for_call(arguments: Any, *, asked: bool = False) -> set[int]:
    """The `id()` of containers in a call's arguments that are nobody's objects.

    Args:
        arguments: None, or `(args, kwargs)` of a strategy's method: among those of `run` are a tuple and a dict that
            were made for the call.
        asked: They are those of an operation on a handle: what is in them is the user's.
    """
    if arguments is None:
        return set()
    positional, keywords = arguments
    if not asked and len(positional) == 3 and type(positional[1]) is tuple and type(positional[2]) is dict:
        return {id(keywords), id(positional[2])}
    return {id(keywords)}


def tuples_of_call(arguments: Any) -> set[int]:
    """The `id()` of the tuples that a call's arguments stand in: what is called never sees them."""
    if arguments is None:
        return set()
    positional = arguments[0]
    return {id(arguments), id(positional), *(id(each) for each in positional[1:2] if type(each) is tuple)}


def objects_in(arguments: Any, *, asked: bool = False) -> Iterator[Any]:
    """The objects in the arguments of a call that the notebook may hold, too; see `made_for_call`."""
    if arguments is None:
        return
    made = made_for_call(arguments, asked=asked)
    positional, keywords = arguments
    pending: list[Any] = [*keywords.values()]
    for value in positional:
        pending.extend(value.values() if id(value) in made else (value,))
    while pending:
        value = pending.pop()
        if type(value) is tuple:
            pending.extend(value)
        elif not is_plain(value):
            yield value


def shape_of(node: Any) -> tuple[str, tuple[int, ...]]:
    """What an array or tensor cannot change where it stands."""
    return str(node.dtype), tuple(node.shape)


def is_simple_code(value: Any) -> bool:
    """Whether calling it cannot change it: functions that close over nothing, and classes made of such."""
    if isinstance(value, types.FunctionType):
        return (
            value.__closure__ is None
            and not value.__dict__
            and is_plain(value.__defaults__)
            and not value.__kwdefaults__
        )
    if isinstance(value, type):
        return all(
            is_plain(part) or type(part) in _DESCRIPTORS or (not isinstance(part, type) and is_simple_code(part))
            for name, part in vars(value).items()
            if name not in _CLASS_FURNITURE
        )
    return False
