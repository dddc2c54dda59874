"""The panel's content as JSON data. Each snapshot is complete, so that a reloaded page needs no earlier one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distnb.errors import DistnbError
from distnb.views.crowds import MOST_SHOWN
from distnb.views.live_model import Line, LiveModel, ReplicaRow
from distnb.views.wording import mark, ranges
from distnb.widgets.content import head

if TYPE_CHECKING:
    from distnb.notebook.engines import EngineStatus
    from distnb.notebook.session import Session
    from distnb.wire.messages import TelemetrySample

__all__ = ["mark_of", "snapshot"]

_MOST_CURVES = 6
_MOST_LINES = 8
_MOST_POINTS = 60


def snapshot(
    session: Session | None, model: LiveModel | None, samples: Mapping[int, TelemetrySample], now: float
) -> dict[str, Any]:
    """Return the panel's content.

    Args:
        session: The running session, if any.
        model: The model of the latest cell that had replicas, if any.
        samples: The latest sample of each engine.

    Returns:
        A dict with `engines` (None without a cluster), `head` (see `content.Head`), `lines` (waits and work in
        words), `curves`, and `running`: True while the cell runs.
    """
    try:
        engines = None if session is None else _engines(session.status(), model, samples)
    except DistnbError:  # the session is being stopped
        engines = None
    if model is None:
        return {"engines": engines, "running": False, "head": None, "lines": [], "curves": []}
    return {
        "engines": engines,
        "running": model.ended_at is None,
        "head": asdict(head(model, now)),
        "lines": [*model.waits.lines(now), *([] if model.work is None else model.work.lines())],
        "curves": [
            {"name": curve.name, "lines": [_line(*shown) for shown in list(curve.shown().items())[:_MOST_LINES]]}
            for curve in list(model.curves.values())[:_MOST_CURVES]
        ],
    }


def mark_of(model: LiveModel) -> dict[str, Any] | None:
    """Return a cell's mark: its strategy, its state, and the states of its replicas; None for an ordinary cell.

    Many replicas are listed by state. `distributed` is true if the whole cell runs under the strategy.
    """
    if not (model.title or model.rows):
        return None
    if len(model.rows) <= MOST_SHOWN:
        rows = [f"{replica} on {row.device}: {row.state}" for replica, row in sorted(model.rows.items())]
    else:
        states: dict[str, list[int]] = {}
        for replica, row in model.rows.items():
            states.setdefault(row.state, []).append(replica)
        rows = [f"{', '.join(ranges(replicas))}: {state}" for state, replicas in states.items()]
    return {
        "title": model.title,
        "state": model.state,
        "replicas": rows,
        "distributed": model.is_distributed,
    }


def _engines(
    rows: Sequence[EngineStatus], model: LiveModel | None, samples: Mapping[int, TelemetrySample]
) -> list[dict[str, Any]]:
    several = len({row.host for row in rows}) > 1
    replicas = {row.engine: row for row in model.rows.values()} if model else {}
    return [
        {
            "engine": row.engine,
            "name": row.task or f"engine {row.engine}",
            "place": f"{row.device} of {row.host}" if several else row.device,
            **_state(row, replicas.get(row.engine)),
            "memory": _memory(samples.get(row.engine)),
        }
        for row in rows
    ]


def _memory(sample: TelemetrySample | None) -> list[dict[str, Any]]:
    """Return the bytes that an engine uses of its machine's and its accelerator's memory, with the total of each."""
    if sample is None:
        return []
    memories = [("memory", sample.rss_nbytes, sample.host_nbytes)]
    memories.append(("on device", sample.device_nbytes or 0, sample.accelerator_nbytes))
    return [{"name": name, "used": used, "total": total} for name, used, total in memories if used]


def _state(status: EngineStatus, row: ReplicaRow | None) -> dict[str, str]:
    """Return the state in a word, its kind ("idle", "running", "busy" or "error"), and the replica's current line, or
    the state in full.
    """
    if status.state.startswith("busy"):
        return {"state": "busy", "kind": "busy", "at": status.state}
    if status.state != "idle":
        return {"state": "died", "kind": "error", "at": status.state}
    if row is None or row.state in ("ended", "died"):  # the engine runs, so a dead process was replaced
        return {"state": "idle", "kind": "idle", "at": ""}
    kind = {"running": "running", "cleaning up": "busy", "failed": "error"}.get(row.state, "idle")
    return {"state": row.state, "kind": kind, "at": row.where}


def _line(replicas: tuple[int, ...], line: Line) -> dict[str, Any]:
    """Return at most `_MOST_POINTS` points, evenly chosen, including the last. A nan or infinite value becomes null."""
    every = max(1, math.ceil(len(line.points) / _MOST_POINTS))
    chosen = line.points[::-1][::every][::-1]
    points = [[step, float(_short(value)) if math.isfinite(value) else None] for step, value, *_ in chosen]
    last = "" if line.last is None else _short(line.last)
    return {"mark": mark(replicas), "first": replicas[0], "last": last, "points": points}


def _short(value: float) -> str:
    return f"{value:.4g}"
