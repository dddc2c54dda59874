"""How handles look: a few lines of text, or a small table, from what is known without asking."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from distnb.notebook.output.wording import filled, html_table

if TYPE_CHECKING:
    from distnb.notebook.handles.state import RemoteState

__all__ = ["as_html", "as_text"]

_UNASSIGNED = "<unassigned>"
_LOST = "<lost: its engine has ended>"
_EARLIER = " as last seen (an engine is stuck: %distnb status)"
_HEADER = ("replica", "type", "shape", "dtype", "device", "value")


def as_text(state: RemoteState, size: int, *, mirrored: bool, fresh: bool = True) -> str:
    """The repr of a handle: one line for a mirrored object, one per replica for others.

    Args:
        fresh: The engines were asked, if there was a reason to.
    """
    earlier = "" if fresh else _EARLIER
    if state.tracked.ended:
        return f"<stale: {state.label} ({state.type_name}) is gone, since the engines were restarted or stopped>"
    if mirrored:
        replica = next((r for r in range(size) if r in state.facts), 0)
        return f"Mirrored({_line(state, replica)}) on {size} replica{'s' * (size != 1)}{earlier}"
    lines = [f"  {replica}: {_line(state, replica)}" for replica in range(size)]
    return "PerReplica:{\n" + ",\n".join(lines) + "\n}" + earlier


def _line(state: RemoteState, replica: int) -> str:
    type_name, shape, dtype, device, value = _cells(state, replica)
    if not type_name:
        return value
    facts = " ".join(part for part in (type_name.rsplit(".", 1)[-1], shape, dtype, device) if part)
    if not shape:
        return value if value else f"<{facts}>"
    return f"<{facts}>" if not value else f"{value} <{facts}>"


def _cells(state: RemoteState, replica: int) -> tuple[str, str, str, str, str]:
    """(type, shape, dtype, device, value) of one replica's component."""
    if replica in state.lost:
        return "", "", "", "", _LOST
    if replica in state.local:
        value = state.local[replica]
        return type(value).__name__, "", "", "", repr(value)
    fact = state.facts.get(replica)
    if fact is None:
        return "", "", "", "", _UNASSIGNED
    summary = fact.summary
    if summary is None:
        return type(fact.value).__name__, "", "", "", repr(fact.value)
    return summary.type, summary.shape, summary.dtype, summary.device, summary.text or ""


def as_html(state: RemoteState, size: int, *, mirrored: bool, fresh: bool = True) -> str:
    """The handle as a table: a row per replica, or one row where all have the same; `fresh` as for `as_text`."""
    if state.tracked.ended:
        return f"<pre>{html.escape(as_text(state, size, mirrored=mirrored))}</pre>"
    rows = [(str(replica), *_cells(state, replica)) for replica in range(size)]
    title = "PerReplica"
    if mirrored:
        title = f"Mirrored on {size} replica{'s' * (size != 1)}"
        rows = [("", *rows[0][1:])] if len({row[1:] for row in rows}) == 1 else rows
    rows = [(row[0], row[1].rsplit(".", 1)[-1], *row[2:]) for row in rows]
    title += "" if fresh else _EARLIER
    header, cells = filled(_HEADER, rows)
    return html_table(header, cells, numeric=("replica",), code=("value",), caption=title)
