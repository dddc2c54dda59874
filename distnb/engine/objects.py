"""The objects of an engine that the notebook knows: its twins, and those behind handles, by space."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distnb.wire.bindings import SpaceKey
from distnb.wire.fingerprints import Fingerprint
from distnb.wire.messages import ObjectId
from distnb.wire.twins import Twins

__all__ = ["Objects", "Pending", "Space"]


@dataclass
class Pending:
    """Effects that were told to the notebook and that it has not confirmed yet.

    Attributes:
        nodes: The pickle's memo: objects that become twins if the notebook took them in.
        names: Names that were assigned, each with what it was before (or `Pending.absent`).
        registered: Paths under which objects got ids of this program.
    """

    absent = object()

    nodes: dict[int, Any]
    names: dict[str, Any]
    registered: set[str]


@dataclass
class Space:
    """The objects of one group of engines, as this engine, one of its replicas, holds them.

    Attributes:
        twins: Every object that has an id.
        fingerprints: Of the notebook's objects, as both sides last agreed on them.
        registered: Paths under which objects got ids in the running program.
        kept: By place, outlines of arguments for calls that are repeated, with the serial of their delivery.
    """

    key: SpaceKey
    replica: int = 0
    twins: Twins = field(default_factory=lambda: Twins(weak=False))
    fingerprints: dict[ObjectId, Fingerprint] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    kept: dict[int, tuple[int, Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many replicas it has."""
        return len(self.key[0])


class Objects:
    """Every space that this engine is part of."""

    def __init__(self) -> None:
        self._spaces: dict[SpaceKey, Space] = {}

    def space(self, key: SpaceKey) -> Space:
        """The space of a key; made when it is new, and then an older one of the same engines is freed."""
        found = self._spaces.get(key)
        if found is None:
            for stale in [old for old in self._spaces if old[0] == key[0]]:
                del self._spaces[stale]
            found = self._spaces[key] = Space(key)
        return found

    def rename(self, old: SpaceKey, new: SpaceKey) -> None:
        """A space goes on with fewer engines, or with more."""
        space = self._spaces.pop(old, None)
        if space is not None:
            space.key = new
            self._spaces[new] = space

    def __len__(self) -> int:
        return sum(len(space.twins) for space in self._spaces.values())
