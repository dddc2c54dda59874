"""How handles look: a few lines of text, or a small table, from what is known without asking."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distnb.session.handles import RemoteState

__all__ = ["as_html", "as_text"]

_UNASSIGNED = "<unassigned>"
_LOST = "<lost: its engine was restarted>"


def as_text(state: RemoteState, size: int, *, mirrored: bool) -> str:
    """The repr of a handle: one line for a mirrored object, one per replica for others."""
    if state.space.ended:
        return f"<stale handle of `{state.name}` ({state.type_name}): the engines were restarted or stopped>"
    if mirrored:
        replica = next((r for r in range(size) if r in state.facts), 0)
        return f"Mirrored({_line(state, replica)}) on {size} replica{'s' * (size != 1)}"
    lines = [f"  {replica}: {_line(state, replica)}" for replica in range(size)]
    return "PerReplica:{\n" + ",\n".join(lines) + "\n}"


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


def as_html(state: RemoteState, size: int, *, mirrored: bool) -> str:
    """The handle as a table with a row per replica."""
    if state.space.ended:
        return f"<pre>{html.escape(as_text(state, size, mirrored=mirrored))}</pre>"
    rows = []
    for replica in range(size):
        cells = "".join(f"<td><code>{html.escape(cell)}</code></td>" for cell in _cells(state, replica))
        rows.append(f"<tr><th>{replica}</th>{cells}</tr>")
    head = "".join(f"<th>{word}</th>" for word in ("replica", "type", "shape", "dtype", "device", "value"))
    title = "Mirrored" if mirrored else "PerReplica"
    return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
