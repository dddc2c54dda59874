"""`distnb.history` and `distnb.live_figure`: the values that `distnb.live` drew, as a table and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distnb.errors import OptionError, closest
from distnb.notebook import compose
from distnb.views.chart_model import Series, series_of
from distnb.views.curves import Point
from distnb.views.runs import History, Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["history", "live_figure"]


def history(*runs: str) -> pandas.DataFrame:
    """Return the values that `distnb.live` drew in this notebook, one row per value. Call it in the notebook.

    A line keeps its first 100,000 values. A longer one keeps every second value, then every fourth, and so on. Runs are
    kept until they hold two million values together. Then the oldest runs are dropped.

    Args:
        *runs: The names of the runs: the `run` that was passed to `distnb.live`, or "In[3]" for a cell
            without a run name. By default, all runs are returned.

    Returns:
        A pandas DataFrame with the columns step (as in the chart), replica, name (of the curve), value, run and time
        (when the value was recorded, in UTC, by the clock of its machine). Its `.to_csv` writes a file.

    Raises:
        OptionError: Nothing was drawn, a run does not exist, or pandas is not installed.

    Example:
        >>> import distnb
        >>> distnb.history("lr=0.1").to_csv("lr01.csv")         # doctest: +SKIP
    """
    return _history().frame(runs)


def live_figure(*names: str, runs: Sequence[str] = (), log: bool = False, smoothing: float = 0.0) -> Figure:
    """Return matplotlib charts of the values that `distnb.live` drew. Call it in the notebook.

    `.savefig("loss.png")` of the figure writes a file.

    Args:
        *names: The names of the curves. By default, all curves of the runs are drawn.
        runs: The names of the runs, see `history`. By default, the latest run is drawn, or all named runs if the
            latest run has a name.
        log: Draw values on a log scale.
        smoothing: The weight of the earlier values at each value, from 0 to below 1, as in the live view's slider.

    Returns:
        A matplotlib Figure that pyplot does not manage.

    Raises:
        OptionError: A run or curve does not exist, `smoothing` is out of range, or matplotlib is not installed.

    Example:
        >>> import distnb
        >>> distnb.live_figure("loss", smoothing=0.9).savefig("loss.png")         # doctest: +SKIP
    """
    if not 0 <= smoothing < 1:
        raise OptionError(f"smoothing={smoothing!r} is out of range. Give a number from 0 (none) to below 1, say 0.9.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "distnb.live_figure needs matplotlib, which is not installed here. Install it: pip install matplotlib."
        ) from None
    chosen = _chosen(runs)
    known = list(dict.fromkeys(name for run in chosen for name in run.curves))
    for name in names:
        if name not in known:
            raise OptionError(
                f"There is no curve {name!r}{closest(name, known)}. These runs have the curves {', '.join(known)}."
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
            "distnb.live keeps values only in a notebook that has loaded distnb. Run %load_ext distnb first."
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
    """Return the exponential moving average of the points' values, computed as in live_view.js."""
    kept, average, mass, drawn = smoothing**width, 0.0, 0.0, []
    for _, value, *_ in points:
        if math.isfinite(value):
            average, mass = kept * average + (1 - kept) * value, kept * mass + (1 - kept)
        drawn.append(average / mass if math.isfinite(value) else value)
    return drawn
