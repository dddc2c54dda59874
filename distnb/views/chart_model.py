"""The content of the live view's charts as data: lines, their labels, and the facts below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from distnb.views.curves import MOST_IN_MEAN, MOST_LINES, Curve, Line, Point, apart, mean_points
from distnb.views.live_model import LiveModel
from distnb.views.runs import Run
from distnb.views.wording import mark, short_number

__all__ = ["COLORS", "Chart", "Series", "charts", "facts", "series_of"]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999933", "#808080")
"""The colours of Okabe and Ito that are visible on light and dark backgrounds. They suit colour blindness."""

_RISING = ("acc", "auc", "f1", "precision", "recall", "score", "iou", "bleu", "psnr")
_FALLING = ("loss", "error", "perplexity", "mae", "mse", "rmse")


class Series(NamedTuple):
    """A line of a chart.

    Attributes:
        label: The replicas or the run that the line shows: "[0-1]", "[3]", "mean of 16", "mean of 64 of 256", or a
            run's name. It is "" with one replica and one run.
        color: The index of its colour in `COLORS`.
        lines: The replicas' lines that it combines. Several lines are drawn as their mean, in the band that they fill.
        thick: True if it represents all replicas.
    """

    label: str
    color: int
    lines: dict[int, Line]
    thick: bool

    @property
    def css_color(self) -> str:
        """The colour in CSS, as `#0072b2`."""
        return COLORS[self.color % len(COLORS)]

    def points(self) -> list[Point]:
        """Return the points to draw."""
        return mean_points(self.lines) if len(self.lines) > 1 else next(iter(self.lines.values())).points

    @property
    def last(self) -> float | None:
        """The latest value, or the mean of the replicas' latest values."""
        latest = [line.last for line in self.lines.values() if line.last is not None]
        return sum(latest) / len(latest) if latest else None


class Chart(NamedTuple):
    """The lines of one name.

    Attributes:
        epochs: The step before each epoch, and the epoch's number from 0 on.
        exploded: The steps at which a value exploded.
        facts: The latest, the least and the greatest value, in words.
    """

    name: str
    series: list[Series]
    epochs: dict[int, int]
    exploded: list[float]
    facts: str


def charts(model: LiveModel) -> list[Chart]:
    """Return every chart of a cell, in the order in which their names first appeared."""
    drawn = []
    for name, runs in model.charts().items():
        own = runs[-1]
        curve = own.curves[name]
        exploded = [line.exploded[0].step for line in curve.shown().values() if line.exploded is not None]
        series = series_of(name, runs, max(1, len(model.rows)))
        drawn.append(Chart(name=name, series=series, epochs=model.marks(own), exploded=exploded, facts=facts(curve)))
    return drawn


def series_of(name: str, runs: Sequence[Run], replicas: int = 0) -> list[Series]:
    """Return the lines of a name: one for each run, or, for a single run of at least `replicas` replicas, for each."""
    if len(runs) == 1:
        curve = runs[0].curves[name]
        return _of_replicas(curve, max(replicas, len(curve.lines)))
    series = []
    for number, run in enumerate(runs):
        lines = {whose[0]: line for whose, line in run.curves[name].shown().items()}
        series.append(Series(label=run.name, color=number, lines=lines, thick=True))
    return series


def _of_replicas(curve: Curve, total: int) -> list[Series]:
    shown = curve.shown()
    if len(shown) > MOST_LINES:
        far = apart(curve.lines)
        crowd = _crowd(curve)
        return [
            crowd,
            *(Series(label=mark([r]), color=1 + i, lines={r: curve.lines[r]}, thick=False) for i, r in enumerate(far)),
        ]
    return [
        Series(
            label=mark(replicas) if total > 1 else "",
            color=replicas[0],
            lines={replicas[0]: line},
            thick=len(replicas) > 1 or total == 1,
        )
        for replicas, line in shown.items()
    ]


def _crowd(curve: Curve) -> Series:
    """Return the mean of all replicas, or of some that are evenly distributed among very many."""
    replicas, whose = sorted(curve.lines), f"mean of {len(curve.lines)}"
    if len(replicas) > MOST_IN_MEAN:
        whose = f"mean of {MOST_IN_MEAN} of {len(replicas):,}"
        replicas = [replicas[place * len(replicas) // MOST_IN_MEAN] for place in range(MOST_IN_MEAN)]
    return Series(label=whose, color=0, lines={replica: curve.lines[replica] for replica in replicas}, thick=True)


def facts(curve: Curve) -> str:
    """Return the latest and the extreme values: `last 0.02 · min 0.0198 at step 480 (best) · max 2.3 at step 1`."""
    latest = [line.last for line in curve.shown().values() if line.last is not None]
    found = [f"last {_together(latest)}"] if latest else []
    least, greatest = curve.extremes()
    if least is not None and greatest is not None and least.value != greatest.value:
        words = curve.name.lower()
        rising = any(word in words for word in _RISING)
        falling = not rising and any(word in words for word in _FALLING)
        for word, extreme, best in (("min", least, falling), ("max", greatest, rising)):
            found.append(f"{word} {short_number(extreme.value)} at step {extreme.step:,.0f}{' (best)' if best else ''}")
    return " · ".join(found)


def _together(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if len(values) > 2 and finite:
        return f"{short_number(min(finite))} to {short_number(max(finite))}"
    return " / ".join(map(short_number, values))
