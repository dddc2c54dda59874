"""A distributed value as it is drawn: what the replicas told of their components, equal ones folded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from distnb.notebook.output.wording import ranges
from distnb.wire.value_facts import Inspected

__all__ = ["Folded", "ValueModel", "fold", "parts", "replicas_text"]


@dataclass(frozen=True)
class ValueModel:
    """What is known of a distributed value.

    Attributes:
        kind: "PerReplica", "Mirrored", or the class of what one process holds.
        size: Replicas that it belongs to.
        components: What they told, by replica; those that are elsewhere are missing.
        absent: Why a replica has none: "<unassigned>".
        notes: What else there is to say.
        together: The components are parts, of which reading makes one value.
    """

    kind: str
    size: int
    components: Mapping[int, Inspected]
    absent: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    together: bool = False

    @property
    def is_mirrored(self) -> bool:
        """Whether its components are to be equal."""
        return self.kind == "Mirrored" and not self.together

    @property
    def title(self) -> str:
        """Its kind, and on how many replicas."""
        if self.kind not in ("PerReplica", "Mirrored"):
            return self.kind
        return f"{self.kind} on {self.size} replica{'s' * (self.size != 1)}"

    @cached_property
    def drifted(self) -> tuple[int, ...]:
        """Replicas of a mirrored value that hold something else than the first somewhere in it."""
        return tuple(sorted(_drifted(self.components))) if self.is_mirrored else ()

    def warning(self) -> str:
        """The drift of a mirrored value, in words; "" where there is none."""
        drifted = self.drifted
        if not drifted:
            return ""
        first = min(self.components)
        verb = "differs" if len(drifted) == 1 else "differ"
        return (
            f"DRIFT: {replicas_text(drifted)} {verb} from replica {first}, though mirrored values are kept equal. "
            "%distnb check NAME says where, and strategy.broadcast(value) makes them equal."
        )


@dataclass(frozen=True)
class Folded:
    """Equal components of some replicas, or what they have in the same place of a structure.

    Attributes:
        replicas: Whose.
        what: What the first of them told.
        devices: Where theirs are, each once.
        differs: Whether its content is not what the first replica has there.
    """

    replicas: tuple[int, ...]
    what: Inspected
    devices: tuple[str, ...]
    differs: bool = False

    @property
    def broken(self) -> str:
        """How many of its elements are nan or infinite, in words; "" where all are finite."""
        told = self.what.statistics
        if told is None:
            return ""
        counts = [f"{told.nans:,} nan"] * bool(told.nans) + [f"{told.infinities:,} inf"] * bool(told.infinities)
        return ", ".join(counts)


def fold(components: Mapping[int, Inspected]) -> list[Folded]:
    """Put components together that are equal wherever they are; in the order of their first replicas."""
    groups: dict[object, list[int]] = {}
    for replica, told in sorted(components.items()):
        # What cannot be compared stands for itself; a graph's device is no difference.
        key = (told.content, told.type, told.shape, told.dtype, told.note, _gradient(told)) if told.content else replica
        groups.setdefault(key, []).append(replica)
    first = next(iter(components[group[0]].content for group in groups.values()), 0)
    return [
        Folded(
            tuple(replicas),
            components[replicas[0]],
            tuple(dict.fromkeys(filter(None, (components[replica].device for replica in replicas)))),
            differs=bool(first) and components[replicas[0]].content not in (0, first),
        )
        for replicas in groups.values()
    ]


def _drifted(components: Mapping[int, Inspected]) -> set[int]:
    within = [_drifted(each) for _, each in parts(components)]
    here = [group.replicas for group in fold(components) if group.differs]
    return set(itertools.chain.from_iterable([*here, *within]))


def _gradient(told: Inspected) -> str:
    """Gradients count as equal where their norms are, but for what the order of summing makes."""
    return "" if told.gradient_norm is None else f"{told.gradient_norm:.5g}"


def parts(components: Mapping[int, Inspected]) -> Iterator[tuple[str, dict[int, Inspected]]]:
    """The parts of structures, by name: what each replica that has one told of it."""
    names = dict.fromkeys(
        itertools.chain.from_iterable((name for name, _ in each.items) for each in components.values())
    )
    by_replica = {replica: dict(each.items) for replica, each in components.items()}
    for name in names:
        yield name, {replica: items[name] for replica, items in by_replica.items() if name in items}


def replicas_text(replicas: tuple[int, ...]) -> str:
    """`replica 1`, `replicas 0–2, 4`."""
    told = ", ".join(each.replace("-", "–") for each in ranges(replicas))
    return f"replica{'s' * (len(replicas) > 1)} {told}"
