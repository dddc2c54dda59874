"""`distnb.history` and `distnb.live_figure`: what was drawn, as a table and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distnb.errors import OptionError, closest
from distnb.notebook import compose
from distnb.notebook.views.chart_model import Series, series_of
from distnb.notebook.views.curves import Point
from distnb.notebook.views.runs import History, Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["history", "live_figure"]


def history(*runs: str) -> pandas.DataFrame:
    """What `distnb.live` drew in this notebook, as a table with a row for each value; its `.to_csv` writes a file.

    In the notebook. Of a line, the first 100,000 values are there; of a longer one every second, or fourth, and so on.
    Runs are kept until they have two million values together; then the oldest are dropped.

    Args:
        *runs: Names of runs: as `distnb.live(run=…)` was given, "In[3]" for what a cell told without one. None: all.

    Returns:
        A pandas DataFrame. step: as in the chart; replica; name: of the curve; value; run; time: when it was told, in
        UTC, by the clock of its machine.

    Raises:
        OptionError: Nothing was drawn, there is no such run, or pandas is not installed.

    Example:
        >>> import distnb
        >>> distnb.history("lr=0.1").to_csv("lr01.csv")         # doctest: +SKIP
    """
    return _history().frame(runs)


def live_figure(*names: str, runs: Sequence[str] = (), log: bool = False, smoothing: float = 0.0) -> Figure:
    """Charts of what `distnb.live` drew, by matplotlib; `.savefig("loss.png")` writes a file. In the notebook.

    Args:
        *names: Of curves; None: all of these runs.
        runs: Names of runs, see `history`. None: the latest, and if that was named, all that were.
        log: A log scale for values.
        smoothing: From 0 to below 1: how much of the earlier values stays at each value, as the slider has it.

    Returns:
        A matplotlib Figure, of which pyplot knows nothing.

    Raises:
        OptionError: There is no such run or curve, a number is wrong, or matplotlib is not installed.

    Example:
        >>> import distnb
        >>> distnb.live_figure("loss", smoothing=0.9).savefig("loss.png")         # doctest: +SKIP
    """
    if not 0 <= smoothing < 1:
        raise OptionError(f"smoothing={smoothing!r}: it is a number from 0 (none) to below 1, for example 0.9.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "distnb.live_figure draws by matplotlib, which is not installed here: pip install matplotlib."
        ) from None
    chosen = _chosen(runs)
    known = list(dict.fromkeys(name for run in chosen for name in run.curves))
    for name in names:
        if name not in known:
            raise OptionError(
                f"There is no curve {name!r}{closest(name, known)}. Those of these runs: {', '.join(known)}."
            )
    drawn = names or known
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.4 * rows), layout="constrained")
    for place, name in enumerate(drawn):
        axes = figure.add_subplot(rows, columns, place + 1, title=name, xlabel="step")
        axes.grid(alpha=0.3)
        if log:
            axes.set_yscale("log")
        own = [run for run in chosen if name in run.curves]
        for series in series_of(name, own):
            _draw(axes, series, smoothing)
        if any(series.label for series in series_of(name, own)):
            axes.legend()
    return figure


def _history() -> History:
    found = compose.history()
    if found is None:
        raise OptionError(
            "Nothing is drawn here: what distnb.live draws is kept in a notebook, after %load_ext distnb."
        )
    return found


def _chosen(names: Sequence[str]) -> list[Run]:
    kept = _history().chosen(names)
    if names:
        return kept
    return [run for run in kept if run.is_named] if kept[-1].is_named else kept[-1:]


def _draw(axes: Axes, series: Series, smoothing: float) -> None:
    points = series.points()
    steps = [point[0] for point in points]
    color, width = series.css_color, 2.0 if series.thick else 1.0
    values = [point[1] for point in points]
    if smoothing:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
        values = _smoothed(points, next(iter(series.lines.values())).width, smoothing)
    elif any(point[2] < point[3] for point in points):
        axes.fill_between(steps, [p[2] for p in points], [p[3] for p in points], color=color, alpha=0.18, linewidth=0)
    axes.plot(steps, values, color=color, linewidth=width, label=series.label, marker="." if len(points) == 1 else "")


def _smoothed(points: Sequence[Point], width: int, smoothing: float) -> list[float]:
    """An exponential moving average, as live_view.js has it."""
    kept, average, mass, drawn = smoothing**width, 0.0, 0.0, []
    for _, value, *_ in points:
        if math.isfinite(value):
            average, mass = kept * average + (1 - kept) * value, kept * mass + (1 - kept)
        drawn.append(average / mass if math.isfinite(value) else value)
    return drawn
