"""The model of a distributed value's view: the replicas' reports of their components, with equal components folded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from distnb.views.wording import ranges
from distnb.wire.value_facts import Inspected

__all__ = ["Folded", "ValueModel", "fold", "parts", "replicas_text"]


@dataclass(frozen=True)
class ValueModel:
    """The reported content of a distributed value.

    Attributes:
        kind: "PerReplica", "Mirrored", "Sharded", or the class of a value that one process holds.
        size: The number of replicas that the value belongs to.
        components: The replicas' reports. Components in other processes are missing.
        absent: The reason why a replica has no component, such as "<unassigned>".
        notes: Further notes for the reader.
        together: True if the components are parts that reading combines into one value.
    """

    kind: str
    size: int
    components: Mapping[int, Inspected]
    absent: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    together: bool = False

    @property
    def is_mirrored(self) -> bool:
        """True if the components should be equal."""
        return self.kind == "Mirrored" and not self.together

    @property
    def title(self) -> str:
        """The kind, and the number of replicas."""
        if self.kind not in ("PerReplica", "Mirrored", "Sharded"):
            return self.kind
        return f"{self.kind} on {self.size} replica{'s' * (self.size != 1)}"

    @cached_property
    def drifted(self) -> tuple[int, ...]:
        """The replicas of a mirrored value whose content differs somewhere from the first replica's."""
        return tuple(sorted(_drifted(self.components))) if self.is_mirrored else ()

    def warning(self) -> str:
        """Return the drift of a mirrored value in words, or "" if there is none."""
        drifted = self.drifted
        if not drifted:
            return ""
        first = min(self.components)
        verb = "differs" if len(drifted) == 1 else "differ"
        return (
            f"DRIFT: {replicas_text(drifted)} {verb} from replica {first}, though mirrored values are kept equal. "
            "%distnb check NAME shows where, and strategy.broadcast(value) makes them equal."
        )


@dataclass(frozen=True)
class Folded:
    """Equal components of some replicas, at one place of a structure.

    Attributes:
        replicas: The replicas that hold them.
        what: The report of the first of these replicas.
        devices: The devices of these components, without duplicates.
        differs: True if the content differs from that of the first replica at this place.
    """

    replicas: tuple[int, ...]
    what: Inspected
    devices: tuple[str, ...]
    differs: bool = False

    @property
    def broken(self) -> str:
        """The numbers of nan and infinite elements in words, or "" if all are finite."""
        inspected = self.what.statistics
        if inspected is None:
            return ""
        counts = [f"{inspected.nans:,} nan"] * bool(inspected.nans) + [f"{inspected.infinities:,} inf"] * bool(
            inspected.infinities
        )
        return ", ".join(counts)


def fold(components: Mapping[int, Inspected]) -> list[Folded]:
    """Group the components that are equal, on any device, in the order of their first replicas."""
    groups: dict[object, list[int]] = {}
    for replica, inspected in sorted(components.items()):
        # A component that cannot be compared is a group of its own. Equal values on different devices are one group.
        key = (
            (inspected.content, inspected.type, inspected.shape, inspected.dtype, inspected.note, _gradient(inspected))
            if inspected.content
            else replica
        )
        groups.setdefault(key, []).append(replica)
    first = next(iter(components[group[0]].content for group in groups.values()), 0)
    return [
        Folded(
            replicas=tuple(replicas),
            what=components[replicas[0]],
            devices=tuple(dict.fromkeys(filter(None, (components[replica].device for replica in replicas)))),
            differs=bool(first) and components[replicas[0]].content not in (0, first),
        )
        for replicas in groups.values()
    ]


def _drifted(components: Mapping[int, Inspected]) -> set[int]:
    within = [_drifted(each) for _, each in parts(components)]
    here = [group.replicas for group in fold(components) if group.differs]
    return set(itertools.chain.from_iterable([*here, *within]))


def _gradient(inspected: Inspected) -> str:
    """Return the gradients' norm, rounded: the order of a sum changes the last digits of equal gradients."""
    return "" if inspected.gradient_norm is None else f"{inspected.gradient_norm:.5g}"


def parts(components: Mapping[int, Inspected]) -> Iterator[tuple[str, dict[int, Inspected]]]:
    """Yield the parts of structures by name, each with the reports of the replicas that have it."""
    names = dict.fromkeys(
        itertools.chain.from_iterable((name for name, _ in each.items) for each in components.values())
    )
    by_replica = {replica: dict(each.items) for replica, each in components.items()}
    for name in names:
        yield name, {replica: items[name] for replica, items in by_replica.items() if name in items}


def replicas_text(replicas: tuple[int, ...]) -> str:
    """Return a set of replicas in words: `replica 1`, `replicas 0–2, 4`."""
    inspected = ", ".join(each.replace("-", "–") for each in ranges(replicas))
    return f"replica{'s' * (len(replicas) > 1)} {inspected}"
