"""Runs, and the history of earlier cells' runs, for comparison in charts and for export as a table."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from distnb.errors import OptionError, closest
from distnb.runtime.step_count import Axis
from distnb.views.curves import Curve

if TYPE_CHECKING:
    import pandas

__all__ = ["MOST_VALUES", "Drawn", "History", "Run"]

MOST_VALUES = 2_000_000
"""The maximum number of values of all kept runs together. Beyond it, the oldest runs are dropped."""


@dataclass
class Run:
    """The values that a cell recorded under one run's name, or under none.

    Attributes:
        name: The name from `distnb.live(run=…)`, or the cell's, such as "In[3]".
        is_named: True if the user named it. Such runs are compared with those of other cells.
        began: The time at which it began, in seconds since 1970.
        base: The training steps of the cell before it began.
        curves: The curves by name, in the order of their first values.
    """

    name: str
    is_named: bool = False
    base: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    axes: defaultdict[int, Axis] = field(default_factory=lambda: defaultdict(Axis))  # by replica, and HERE

    def curve(self, name: str) -> Curve:
        """Return the curve of this name, created if it does not exist."""
        curve = self.curves.get(name)
        if curve is None:
            curve = self.curves[name] = Curve(name=name)
        return curve

    def __len__(self) -> int:
        return sum(len(line.record) for curve in self.curves.values() for line in curve.lines.values())


class Drawn(NamedTuple):
    """A value that was drawn; `time` in seconds since 1970."""

    step: float
    replica: int
    name: str
    value: float
    run: str
    time: float


class History:
    """The runs of a notebook by name, the latest last. A later run replaces an earlier one of the same name."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}

    def begin(self, run: Run) -> None:
        """Add a run that begins now."""
        self.runs.pop(run.name, None)
        while self.runs and sum(map(len, self.runs.values())) > MOST_VALUES:
            del self.runs[next(iter(self.runs))]
        self.runs[run.name] = run

    def chosen(self, names: Sequence[str] = ()) -> list[Run]:
        """Return the runs of these names, or all. Raises OptionError if a name is unknown or nothing was drawn."""
        if not self.runs:
            raise OptionError("Nothing has been drawn in this notebook yet. Draw values with distnb.live(loss=loss).")
        for name in names:
            if name not in self.runs:
                raise OptionError(
                    f"There is no run {name!r}{closest(name, self.runs)}. These runs are kept: {', '.join(self.runs)}."
                )
        return [self.runs[name] for name in names] or list(self.runs.values())

    def values(self, names: Sequence[str] = ()) -> Iterator[Drawn]:
        """Yield all values of runs, by run, name and replica."""
        for run in self.chosen(names):
            for curve in run.curves.values():
                for replica, line in sorted(curve.lines.items()):
                    for step, value, seconds in line.record.since(0):
                        yield Drawn(
                            step=step, replica=replica, name=curve.name, value=value, run=run.name, time=seconds
                        )

    def frame(self, names: Sequence[str] = ()) -> pandas.DataFrame:
        """Return the values as a table; see `distnb.history`."""
        try:
            import pandas
        except ImportError:
            raise OptionError(
                "distnb.history needs pandas, which is not installed here. Install it: pip install pandas."
            ) from None
        table = pandas.DataFrame.from_records(list(self.values(names)), columns=Drawn._fields)
        table["step"] = table["step"].astype("int64")
        table["time"] = pandas.to_datetime(table["time"], unit="s")
        return table
