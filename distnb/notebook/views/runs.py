"""Runs, and what is kept of those of earlier cells: to be compared in charts, and given out as a table."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from distnb.errors import OptionError, closest
from distnb.notebook.views.curves import Curve
from distnb.runtime.step_count import Axis

if TYPE_CHECKING:
    import pandas

__all__ = ["MOST_VALUES", "Drawn", "History", "Run"]

MOST_VALUES = 2_000_000
"""Runs are kept until they have more values than this together: then the oldest are dropped."""


@dataclass
class Run:
    """What a cell was told under one name of a run, or under none.

    Attributes:
        name: As `distnb.live(run=…)` gave it, or the cell's, "In[3]".
        is_named: Whether the user named it: such runs are compared with those of other cells.
        began: When, in seconds since 1970.
        base: Training steps of the cell before it began.
        curves: By name, in the order in which they came.
    """

    name: str
    is_named: bool = False
    base: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    axes: defaultdict[int, Axis] = field(default_factory=lambda: defaultdict(Axis))  # by replica, and HERE

    def curve(self, name: str) -> Curve:
        """The curve of this name."""
        return self.curves.setdefault(name, Curve(name))

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
    """The runs of a notebook, by name, the latest last. A name that a later cell uses again is that cell's."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}

    def begin(self, run: Run) -> None:
        """A run begins."""
        self.runs.pop(run.name, None)
        while self.runs and sum(map(len, self.runs.values())) > MOST_VALUES:
            del self.runs[next(iter(self.runs))]
        self.runs[run.name] = run

    def chosen(self, names: Sequence[str] = ()) -> list[Run]:
        """The runs of these names; without any, all. OptionError where one is not known, or nothing was drawn."""
        if not self.runs:
            raise OptionError("Nothing has been drawn in this notebook yet: distnb.live(loss=loss) draws values.")
        for name in names:
            if name not in self.runs:
                raise OptionError(
                    f"There is no run {name!r}{closest(name, self.runs)}. Those that are kept: {', '.join(self.runs)}."
                )
        return [self.runs[name] for name in names] or list(self.runs.values())

    def values(self, names: Sequence[str] = ()) -> Iterator[Drawn]:
        """All values of runs, by run, name and replica."""
        for run in self.chosen(names):
            for curve in run.curves.values():
                for replica, line in sorted(curve.lines.items()):
                    for step, value, seconds in line.record.since(0):
                        yield Drawn(step, replica, curve.name, value, run.name, seconds)

    def frame(self, names: Sequence[str] = ()) -> pandas.DataFrame:
        """The values as a table; see `distnb.history`."""
        try:
            import pandas
        except ImportError:
            raise OptionError(
                "distnb.history() gives a pandas DataFrame, and pandas is not installed here: pip install pandas."
            ) from None
        table = pandas.DataFrame.from_records(list(self.values(names)), columns=Drawn._fields)
        table["step"] = table["step"].astype("int64")
        table["time"] = pandas.to_datetime(table["time"], unit="s")
        return table
