"""The model of a placement's view: the parts of each tensor of a value, from the reports of their holders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distnb.views.value_model import replicas_text
from distnb.views.wording import ranges
from distnb.wire.value_facts import Holding

__all__ = ["PlacedPart", "PlacedTensor", "PlacementModel", "bounds_text"]


@dataclass(frozen=True)
class PlacedPart:
    """A part of a tensor, with all replicas that hold a copy of it.

    Attributes:
        replicas: The replicas that hold it; empty if another process does.
        holder: The name of that process, such as "ps 0"; "" for replicas.
        devices: The devices of the copies, without duplicates.
        what: The report of one copy.
    """

    replicas: tuple[int, ...]
    holder: str
    devices: tuple[str, ...]
    what: Holding

    @property
    def who(self) -> str:
        """The holders in words."""
        return self.holder or replicas_text(self.replicas)

    @property
    def short(self) -> str:
        """The holders as a short text."""
        return self.holder or ",".join(each.replace("-", "–") for each in ranges(self.replicas))

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        return self.what.nbytes * (1 if self.what.kind == "shared" else max(1, len(self.replicas)))


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of a value, and the places of its parts."""

    name: str
    whole: tuple[int, ...]
    dtype: str
    parts: tuple[PlacedPart, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all parts and copies."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_split(self) -> bool:
        """True if the tensor has different parts whose bounds are all known."""
        return len({part.what.bounds for part in self.parts}) > 1 and all(part.what.bounds for part in self.parts)

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The axes along which the tensor is split."""
        bounds = [part.what.bounds for part in self.parts if part.what.bounds is not None]
        return tuple(axis for axis in range(len(self.whole)) if len({each[axis] for each in bounds}) > 1)

    def holders(self, cell: Mapping[int, tuple[int, int]]) -> tuple[PlacedPart, ...]:
        """Return the parts that contain a cell, which is given by its bounds on some axes."""
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
        """Return the pieces into which the bounds of all parts cut an axis."""
        bounds = [part.what.bounds for part in self.parts if part.what.bounds is not None]
        at = sorted({0, self.whole[axis], *itertools.chain.from_iterable(each[axis] for each in bounds)})
        return list(itertools.pairwise(at))


@dataclass(frozen=True)
class PlacementModel:
    """The placement of a value.

    Attributes:
        title: The name and kind of the value.
        size: The number of replicas that were asked.
        tensors: The tensors of the value.
        notes: Further notes for the reader.
    """

    title: str
    size: int
    tensors: tuple[PlacedTensor, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, size: int, reports: Mapping[int, Sequence[Holding]], notes: Iterable[str] = (), here: str = ""
    ) -> PlacementModel:
        """Combine the replicas' reports. With `here`, a single process of that name made the report."""
        by_name: dict[str, list[tuple[int, Holding]]] = {}
        for replica, holdings in sorted(reports.items()):
            for each in holdings:
                by_name.setdefault(each.name, []).append((replica, each))
        tensors = tuple(_tensor(name, each, here) for name, each in by_name.items())
        return cls(title, size, tensors, tuple(notes))

    def by_device(self) -> dict[str, int]:
        """Return the bytes of each replica and other holder, and of shared memory."""
        found: dict[str, int] = {}
        for part in itertools.chain.from_iterable(tensor.parts for tensor in self.tensors):
            if part.what.kind == "shared":
                found["shared memory"] = found.get("shared memory", 0) + part.what.nbytes
                continue
            names = [part.holder] if part.holder else [f"replica {replica}" for replica in part.replicas]
            for name in names:
                found[name] = found.get(name, 0) + part.what.nbytes
        return found


def _tensor(name: str, reports: list[tuple[int, Holding]], here: str) -> PlacedTensor:
    groups: dict[object, list[tuple[int, Holding]]] = {}
    for replica, each in reports:
        key = (each.holder, each.bounds, each.kind, each.note, each.whole)
        groups.setdefault(key, []).append((replica, each))
    first = reports[0][1]
    return PlacedTensor(
        name=name, whole=first.whole, dtype=first.dtype, parts=tuple(_part(group, here) for group in groups.values())
    )


def _part(group: list[tuple[int, Holding]], here: str) -> PlacedPart:
    devices = tuple(dict.fromkeys(each.device for _, each in group if each.device))
    holder = group[0][1].holder or here
    if holder.startswith("replica "):  # one process has reported for several replicas
        return PlacedPart(
            replicas=(int(holder.removeprefix("replica ")),), holder="", devices=devices, what=group[0][1]
        )
    return PlacedPart(
        replicas=() if holder else tuple(replica for replica, _ in group),
        holder=holder,
        devices=devices,
        what=group[0][1],
    )


def bounds_text(holding: Holding) -> str:
    """Return the bounds of a part in words: "rows 0–31" or "[0:4, 8:16]"; "all" for the whole."""
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
