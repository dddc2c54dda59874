"""The words and cells of the live view: one text for widgets, saved pictures and terminals."""

from __future__ import annotations

import html

from distnb.notebook.output.live_model import Curve, Line, LiveModel
from distnb.notebook.output.wording import filled, html_table, human_bytes
from distnb.widgets.picture import as_image, pictures, short_number

__all__ = ["head_text", "live_html", "picture_bundle", "plain_summary", "replica_table"]

_COLORS = {"failed": "#ef4444", "died": "#ef4444", "interrupted": "#ca8a04"}
"""Of the dot beside a cell's status, where not all is well."""


def head_text(model: LiveModel, now: float) -> str:
    """The status line: `mirrored · 2 replicas · running · 12.3 s · step 120 · 5,230 examples/s`."""
    parts = [model.title] if model.title else []
    if model.rows:
        parts.append("1 replica" if len(model.rows) == 1 else f"{len(model.rows)} replicas")
    parts += [model.state, _duration(model.seconds(now))]
    if model.steps:
        parts.append(f"step {model.steps:,}")
    examples = sum(row.examples_per_second() for row in model.rows.values())
    if examples:
        parts.append(f"{examples:,.0f} examples/s")
    return " · ".join(parts)


def replica_table(model: LiveModel) -> tuple[list[str], list[list[str]]]:
    """Titles, and a row for each replica; columns that nobody has anything for are left out."""
    header = ["replica", "device", "state", "step", "examples/s", "memory", "on device", *model.curves, "at"]
    rows = [
        [
            str(row.replica),
            row.device,
            row.state if row.state != "running" and model.state != "ended" else "",
            _count(row.steps),
            _count(row.examples_per_second()),
            human_bytes(row.rss_nbytes),
            human_bytes(row.device_nbytes),
            *(short_number(row.values.get(name)) for name in model.curves),
            row.where if row.state != "ended" else "",
        ]
        for _, row in sorted(model.rows.items())
    ]
    return filled(header, rows)


def plain_summary(model: LiveModel, now: float) -> str:
    """The view in plain text."""
    return "\n".join([head_text(model, now), *(_curve_text(curve) for curve in model.curves.values())])


def _table_html(model: LiveModel) -> str:
    """The replicas' table; nothing where there are none."""
    header, rows = replica_table(model)
    return html_table(header, rows, numeric=set(header) - {"device", "state", "at"}) if rows else ""


def live_html(model: LiveModel, now: float) -> str:
    """What the widget shows while the cell runs: pictures of a page's own, which change without a flicker."""
    dot = f'<span class="dot {model.state}"></span>'
    head = f'<div class="status">{dot}<span class="head">{html.escape(head_text(model, now))}</span></div>'
    return f'{head}<div class="charts">{"".join(pictures(model).values())}</div>{_table_html(model)}'


def picture_bundle(model: LiveModel, now: float) -> dict[str, str]:
    """Pictures and replicas: what stays when the cell has ended. Nothing in it needs a kernel, a script or trust."""
    dot = f'<span style="color:{_COLORS.get(model.state, "#808080")}">●</span>'
    parts = [f'<div style="font-size:13px">{dot} {html.escape(head_text(model, now))}</div>']
    parts += [as_image(svg, _curve_text(model.curves[name])) for name, svg in pictures(model).items()]
    if model.ended_at is None or model.curves or model.steps or model.state in _COLORS:
        parts.append(_table_html(model))
    html_text = f'<div class="distnb-live">{"".join(parts)}</div>'
    return {"text/html": html_text, "text/plain": plain_summary(model, now)}


def _curve_text(curve: Curve) -> str:
    return f"{curve.name}: {', '.join(_first_and_last(line) for line in curve.shown().values() if line.points)}"


def _first_and_last(line: Line) -> str:
    first = f"{short_number(line.points[0][1])} → " if len(line.points) > 1 else ""
    return f"{first}{short_number(line.last)}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value else ""


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
