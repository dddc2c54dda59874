"""The table of detached clusters, for `%distnb list` and `distnb list`."""

from __future__ import annotations

import time

from distnb.detached.daemon_client import summaries
from distnb.detached.protocol import ClusterSummary
from distnb.views.wording import text_table

__all__ = ["HEADER", "rows", "text"]

HEADER = ("name", "engines", "machines", "memory", "age", "ends in", "used by")


def rows() -> list[tuple[str, ...]]:
    """Return a row for each of the user's detached clusters on this machine, the oldest first."""
    return [_row(summary, time.time()) for summary in summaries()]


def text() -> str:
    """Return the table as text."""
    found = rows()
    if not found:
        return "You have no detached cluster on this machine. In a notebook, %distnb start --detach starts one."
    return "\n".join(text_table(HEADER, found))


def _row(summary: ClusterSummary, now: float) -> tuple[str, ...]:
    ended = f" ({summary.ended} ended)" if summary.ended else ""
    return (
        summary.name,
        f"{summary.engines} on {summary.devices}{ended}",
        summary.hosts or "this one",
        "not known" if summary.rss_nbytes is None else f"{summary.rss_nbytes / 1e9:.1f} GB",
        _duration(now - summary.started),
        "no limit" if summary.ends is None else _duration(max(0.0, summary.ends - now)),
        summary.used_by or "nobody",
    )


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
