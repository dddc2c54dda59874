"""What a chart of the live view shows, as data: which lines, what they are called, and the facts below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from distnb.notebook.output.curves import MOST_LINES, Curve, Line, Point, apart, mean_points
from distnb.notebook.output.live_model import LiveModel
from distnb.notebook.output.runs import Run
from distnb.notebook.output.wording import mark, short_number

__all__ = ["Chart", "Series", "charts", "facts"]

_RISING = ("acc", "auc", "f1", "precision", "recall", "score", "iou", "bleu", "psnr")
_FALLING = ("loss", "error", "perplexity", "mae", "mse", "rmse")


class Series(NamedTuple):
    """A line of a chart.

    Attributes:
        label: Whose it is: "[0-1]", "[3]", "mean of 16", or a run's name; "" where there is one replica and one run.
        color: Its number among the chart's colours.
        lines: What it is made of, by replica. Of several, the mean is drawn, in the band that they fill.
        thick: Whether it stands for all replicas.
    """

    label: str
    color: int
    lines: dict[int, Line]
    thick: bool

    def points(self) -> list[Point]:
        """What is drawn."""
        return mean_points(self.lines) if len(self.lines) > 1 else next(iter(self.lines.values())).points

    @property
    def last(self) -> float | None:
        """The latest value, or the mean of the replicas' latest."""
        latest = [line.last for line in self.lines.values() if line.last is not None]
        return sum(latest) / len(latest) if latest else None


class Chart(NamedTuple):
    """One name's lines.

    Attributes:
        epochs: Step before each epoch, and the epoch's number from 0 on.
        exploded: The steps at which a value exploded.
        facts: The latest, the least and the greatest value, in words.
    """

    name: str
    series: list[Series]
    epochs: dict[int, int]
    exploded: list[float]
    facts: str


def charts(model: LiveModel) -> list[Chart]:
    """Every chart of a cell, in the order in which the names came."""
    total = max(1, len(model.rows))
    drawn = []
    for name, runs in model.charts().items():
        own = runs[-1]
        curve = own.curves[name]
        exploded = [line.exploded[0].step for line in curve.shown().values() if line.exploded is not None]
        epochs = model.marks(own)
        series = _of_runs(runs, name, model) if len(runs) > 1 else _of_replicas(curve, total)
        drawn.append(Chart(name, series, epochs, exploded, facts(curve)))
    return drawn


def _of_replicas(curve: Curve, total: int) -> list[Series]:
    shown = curve.shown()
    if len(shown) > MOST_LINES:
        far = apart(curve.lines)
        crowd = Series(f"mean of {len(shown)}", 0, dict(sorted(curve.lines.items())), True)
        return [crowd, *(Series(mark([r]), 1 + i, {r: curve.lines[r]}, False) for i, r in enumerate(far))]
    return [
        Series(mark(replicas) if total > 1 else "", replicas[0], {replicas[0]: line}, len(replicas) > 1 or total == 1)
        for replicas, line in shown.items()
    ]


def _of_runs(runs: Sequence[Run], name: str, model: LiveModel) -> list[Series]:
    series = []
    for number, run in enumerate(runs):
        lines = {replicas[0]: line for replicas, line in run.curves[name].shown().items()}
        series.append(Series(run.name, number, lines, run.name in model.runs))
    return series


def facts(curve: Curve) -> str:
    """The latest, the least and the greatest value: `last 0.02 · min 0.0198 at step 480 (best) · max 2.3 at step 1`."""
    latest = [line.last for line in curve.shown().values() if line.last is not None]
    told = [f"last {_together(latest)}"] if latest else []
    least, greatest = curve.extremes()
    if least is not None and greatest is not None and least.value != greatest.value:
        words = curve.name.lower()
        rising = any(word in words for word in _RISING)
        falling = not rising and any(word in words for word in _FALLING)
        for word, extreme, best in (("min", least, falling), ("max", greatest, rising)):
            told.append(f"{word} {short_number(extreme.value)} at step {extreme.step:,.0f}{' (best)' if best else ''}")
    return " · ".join(told)


def _together(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if len(values) > 2 and finite:
        return f"{short_number(min(finite))} to {short_number(max(finite))}"
    return " / ".join(map(short_number, values))
