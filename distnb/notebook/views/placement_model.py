"""Where the parts of a value are, as it is drawn: what each replica told of what it holds, put together by tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distnb.notebook.output.wording import ranges
from distnb.notebook.views.value_model import replicas_text
from distnb.wire.value_facts import Holding

__all__ = ["PlacedPart", "PlacedTensor", "PlacementModel", "bounds_text"]


@dataclass(frozen=True)
class PlacedPart:
    """A part of a tensor, and all that hold it: several hold copies of it.

    Attributes:
        replicas: Which of them; empty where others do.
        holder: Who does then: "ps 0".
        nbytes: Of one copy.
    """

    replicas: tuple[int, ...]
    holder: str
    devices: tuple[str, ...]
    what: Holding

    @property
    def who(self) -> str:
        """Who holds it, in words."""
        return self.holder or replicas_text(self.replicas)

    @property
    def short(self) -> str:
        """Who holds it, in little room."""
        return self.holder or ",".join(each.replace("-", "–") for each in ranges(self.replicas))

    @property
    def nbytes(self) -> int:
        """Bytes of all its copies."""
        return self.what.nbytes * (1 if self.what.kind == "shared" else max(1, len(self.replicas)))


@dataclass(frozen=True)
class PlacedTensor:
    """One tensor of a value, and where its parts are."""

    name: str
    whole: tuple[int, ...]
    dtype: str
    parts: tuple[PlacedPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts and copies."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_split(self) -> bool:
        """Whether it is known how different parts of it are in different places."""
        return len({part.what.bounds for part in self.parts}) > 1 and all(part.what.bounds for part in self.parts)

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The axes along which it is cut."""
        bounds = [part.what.bounds for part in self.parts if part.what.bounds is not None]
        return tuple(axis for axis in range(len(self.whole)) if len({each[axis] for each in bounds}) > 1)

    def holders(self, cell: Mapping[int, tuple[int, int]]) -> tuple[PlacedPart, ...]:
        """The parts that have a cell, which is told by its bounds on some axes."""
        return tuple(
            part
            for part in self.parts
            if part.what.bounds
            and all(
                part.what.bounds[axis][0] <= first < last <= part.what.bounds[axis][1]
                for axis, (first, last) in cell.items()
            )
        )

    def cuts(self, axis: int) -> list[tuple[int, int]]:
        """Into which pieces all its parts' bounds cut an axis."""
        bounds = [part.what.bounds for part in self.parts if part.what.bounds is not None]
        at = sorted({0, self.whole[axis], *itertools.chain.from_iterable(each[axis] for each in bounds)})
        return list(itertools.pairwise(at))


@dataclass(frozen=True)
class PlacementModel:
    """Where a value is.

    Attributes:
        title: What it is.
        size: Replicas that were asked.
        tensors: Those of the value.
        notes: What else there is to say.
    """

    title: str
    size: int
    tensors: tuple[PlacedTensor, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, size: int, told: Mapping[int, Sequence[Holding]], notes: Iterable[str] = (), here: str = ""
    ) -> PlacementModel:
        """Put together what replicas told; with `here`, one process did that is called so."""
        by_name: dict[str, list[tuple[int, Holding]]] = {}
        for replica, holdings in sorted(told.items()):
            for each in holdings:
                by_name.setdefault(each.name, []).append((replica, each))
        tensors = tuple(_tensor(name, each, here) for name, each in by_name.items())
        return cls(title, size, tensors, tuple(notes))

    def by_device(self) -> dict[str, int]:
        """Bytes of it in each place."""
        found: dict[str, int] = {}
        for part in itertools.chain.from_iterable(tensor.parts for tensor in self.tensors):
            if part.what.kind == "shared":
                found["memory in common"] = found.get("memory in common", 0) + part.what.nbytes
                continue
            names = [part.holder] if part.holder else [f"replica {replica}" for replica in part.replicas]
            for name in names:
                found[name] = found.get(name, 0) + part.what.nbytes
        return found


def _tensor(name: str, told: list[tuple[int, Holding]], here: str) -> PlacedTensor:
    groups: dict[object, list[tuple[int, Holding]]] = {}
    for replica, each in told:
        key = (each.holder, each.bounds, each.kind, each.note, each.whole)
        groups.setdefault(key, []).append((replica, each))
    first = told[0][1]
    return PlacedTensor(name, first.whole, first.dtype, tuple(_part(group, here) for group in groups.values()))


def _part(group: list[tuple[int, Holding]], here: str) -> PlacedPart:
    devices = tuple(dict.fromkeys(each.device for _, each in group if each.device))
    holder = group[0][1].holder or here
    if holder.startswith("replica "):  # one process told of several
        return PlacedPart((int(holder.removeprefix("replica ")),), "", devices, group[0][1])
    return PlacedPart(() if holder else tuple(replica for replica, _ in group), holder, devices, group[0][1])


def bounds_text(holding: Holding) -> str:
    """Which part it is, as one writes it: "rows 0–31", "[0:4, 8:16]"; "all" for the whole."""
    bounds, whole = holding.bounds, holding.whole
    if bounds is None:
        return ""
    if any(first >= last for first, last in bounds) and all(whole):
        return "nothing"
    if holding.kind == "rows" or (holding.kind == "stored" and len(bounds) and bounds[0] != (0, whole[0])):
        first, last = bounds[0]
        return f"rows {first}–{last - 1}" if last - first > 1 else f"row {first}"
    if all(each == (0, size) for each, size in zip(bounds, whole, strict=True)):
        return "all"
    return (
        "["
        + ", ".join(":" if e == (0, size) else f"{e[0]}:{e[1]}" for e, size in zip(bounds, whole, strict=True))
        + "]"
    )
