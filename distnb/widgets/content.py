"""The texts and table cells of the live view, shared by widgets, saved pictures and terminals."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import NamedTuple

from distnb.views.chart_model import Chart, Series, charts
from distnb.views.crowds import noteworthy, others, unlikeness
from distnb.views.curves import MOST_LINES
from distnb.views.live_model import LiveModel, ReplicaRow
from distnb.views.wording import (
    duration,
    filled,
    html_table,
    human_bytes,
    note_html,
    short_number,
    whole_number,
)
from distnb.widgets.picture import as_image, picture
from distnb.widgets.timeline_picture import timeline_html, timeline_image, timeline_text, waits_html

__all__ = [
    "Head",
    "LiveHtml",
    "head",
    "head_text",
    "live_html",
    "picture_bundle",
    "plain_summary",
    "replica_table",
]

_COLORS = {"failed": "#ef4444", "died": "#ef4444", "interrupted": "#ca8a04"}
"""The colours of the dot in a cell's status line if something went wrong."""

_SIDE_BY_SIDE = "display:inline-block;vertical-align:top;margin-right:24px"
_WHOLE = "white-space:nowrap"


@dataclass(frozen=True)
class Head:
    """The parts of a cell's status line.

    Example: `mirrored`, `2 replicas`, `running`, and the facts `12.3 s`, `step 120`, `5,230 examples/s`.
    """

    title: str
    count: str
    state: str
    facts: list[str]

    def __str__(self) -> str:
        return " · ".join(filter(None, [self.title, self.count, self.state, *self.facts]))

    @property
    def html(self) -> str:
        """The status line as HTML that breaks only between its parts."""
        parts = [("title", self.title), ("count", self.count), ("state", self.state)]
        parts += [("fact", fact) for fact in self.facts]
        spans = (f'<span class="{kind}" style="{_WHOLE}">{html.escape(text)}</span>' for kind, text in parts if text)
        return " · ".join(spans)


def head(model: LiveModel, now: float) -> Head:
    """Return the parts of a cell's status line."""
    work = model.work
    count, who = (len(model.rows), "replica") if work is None else (work.workers, "worker")
    counted = f"{count} {who}{'s' if count > 1 else ''}" if count else ""
    facts = [duration(model.seconds(now))]
    if model.state == "cleaning up":
        facts.append("stop again to end it now")
    if model.steps:
        facts.append(
            f"step {model.steps:,}" if work is None else f"{model.steps:,} step{'s' if model.steps > 1 else ''}"
        )
    facts += _reading_facts(model)
    facts += [] if work is None else work.facts(ended=model.ended_at is not None)
    examples = sum(row.examples_per_second() for row in model.rows.values())
    if examples:
        facts.append(f"{examples:,.0f} examples/s")
    return Head(title=model.title, count=counted, state=model.state, facts=facts)


def head_text(model: LiveModel, now: float) -> str:
    """Return the status line: `mirrored · 2 replicas · running · 12.3 s · step 120 · 5,230 examples/s`."""
    return str(head(model, now))


def replica_table(model: LiveModel) -> tuple[list[str], list[list[str]]]:
    """Return the column titles and a row for each replica, without the columns that are empty in all rows.

    Of many replicas, those that failed or lag behind have rows, and the first ones.
    """
    header = ["replica", "device", "state", "step", "examples/s", "memory", "on device", *model.curves, "at"]
    rows = [
        [
            str(row.replica),
            row.device,
            row.state if row.state != "running" and model.state != "ended" else "",
            whole_number(row.steps),
            whole_number(row.examples_per_second()),
            human_bytes(row.rss_nbytes),
            human_bytes(row.device_nbytes),
            *(short_number(row.values.get(name)) for name in model.curves),
            row.where if row.state != "ended" else "",
        ]
        for row in _shown_rows(model)
    ]
    return filled(header, rows)


def _shown_rows(model: LiveModel) -> list[ReplicaRow]:
    lag = unlikeness({replica: row.steps for replica, row in model.rows.items()})
    exceptions = {replica: row.state not in ("running", "ended") for replica, row in model.rows.items()}
    return [model.rows[replica] for replica in noteworthy({each: lag[each] + exceptions[each] for each in lag})]


def plain_summary(model: LiveModel, now: float) -> str:
    """Return the view as plain text."""
    lines = [head_text(model, now), *model.troubles(), *map(_chart_text, charts(model))]
    lines += [] if model.work is None else model.work.lines()
    lines += filter(None, [timeline_text(model), *(model.waits.lines(now) or model.waited)])
    return "\n".join(lines)


def _tables_html(model: LiveModel) -> str:
    """Return the table of the replicas, or the tables of the work that is followed, or "" without rows."""
    if model.work is None:
        header, rows = replica_table(model)
        table = html_table(header, rows, numeric=set(header) - {"device", "state", "at"}) if rows else ""
        table += note_html(others(len(rows), len(model.rows)))
        return f'<div style="overflow-x:auto">{table}</div>' if rows else ""
    cells = "".join(f'<div style="{_SIDE_BY_SIDE}">{table}</div>' for table in model.work.tables(model))
    return f'<div style="overflow-x:auto">{cells}</div>'


class LiveHtml(NamedTuple):
    """The widget's HTML above and below the charts. The page itself draws the charts."""

    above: str
    below: str


def live_html(model: LiveModel, now: float) -> LiveHtml:
    """Return the HTML that the widget shows while the cell runs. Its pictures are inline, so they do not flicker."""
    dot = f'<span class="dot {model.state}"></span>'
    status = f'<div class="status">{dot}<span class="head">{head(model, now).html}</span></div>'
    work = model.work.picture() if model.work is not None else ""
    above = f"{status}{_troubles_html(model)}{waits_html(model, now)}{work}"
    return LiveHtml(above, f"{timeline_html(model)}{_tables_html(model)}")


def picture_bundle(model: LiveModel, now: float) -> dict[str, str]:
    """Return the pictures and tables that remain after the cell has ended. They need no kernel, script or trust."""
    dot = f'<span style="color:{_COLORS.get(model.state, "#808080")}">●</span>'
    parts = [f'<div style="font-size:13px">{dot} {head(model, now).html}</div>']
    parts += [_troubles_html(model), waits_html(model, now)]
    if model.work is not None:
        parts.append(as_image(model.work.picture(), model.work.picture_text(), wide=True))
    drawn = charts(model)
    wide = len(drawn) == 1
    parts += [as_image(picture(chart, wide=wide), _chart_text(chart), wide=wide) for chart in drawn]
    parts.append(timeline_image(model))
    if model.ended_at is None or model.curves or model.steps or model.state in _COLORS or model.work is not None:
        parts.append(_tables_html(model))
    html_text = f'<div class="distnb-live">{"".join(parts)}</div>'
    return {"text/html": html_text, "text/plain": plain_summary(model, now)}


def _troubles_html(model: LiveModel) -> str:
    lines = "<br>".join(f"⚠ {html.escape(text)}" for text in model.troubles())
    return f'<div class="troubles" style="color:#d93a3f;font-size:13px">{lines}</div>' if lines else ""


def _chart_text(chart: Chart) -> str:
    values = ", ".join(_first_and_last(series) for series in chart.series[:MOST_LINES])
    return " · ".join(filter(None, [f"{chart.name}: {values}", chart.facts.partition(" · ")[2]]))


def _first_and_last(series: Series) -> str:
    points = series.points()
    first = f"{short_number(points[0][1])} → " if len(points) > 1 else ""
    whose = f" {series.label}" if series.label and not series.label.startswith("[") else ""
    return f"{first}{short_number(series.last)}{whose}"


def _reading_facts(model: LiveModel) -> list[str]:
    """Return the training's progress: `epoch 2 of 10`, `batch 30 of 500`, `40 s left of the epoch`."""
    reading = model.reading
    if reading is None:
        return []
    facts = [f"epoch {reading.epoch + 1}" + (f" of {reading.epochs}" if reading.epochs is not None else "")]
    if reading.batches is not None and model.ended_at is None:
        facts.append(f"batch {reading.batch:,} of {reading.batches:,}")
    left = model.seconds_left()
    if left is not None:
        seconds, is_all = left
        facts.append(f"{duration(seconds)} left{'' if is_all else ' of the epoch'}")
    return facts
