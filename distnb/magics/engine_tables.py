"""The engines of a cluster as text: the line after a start, and the rows of `%distnb status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from distnb.notebook.engines import EngineStatus
from distnb.views.wording import ranges

__all__ = ["STATUS_COLUMNS", "ready_text", "status_rows"]

STATUS_COLUMNS = ("engine", "task", "device", "state", "runs", "holds", "pid", "host")

_MOST_PLACES = 16
_MOST_ROWS = 64


def ready_text(rows: Sequence[EngineStatus]) -> str:
    """Return the places of engines: "0 on cpu:0, 1 on cpu:1", or of many: "8 on each of 32 machines"."""
    hosts = Counter(row.host for row in rows)
    if len(rows) <= _MOST_PLACES:
        several = len(hosts) > 1
        return ", ".join(
            f"{row.task or row.engine} on {row.device}" + (f" of {row.host}" if several else "") for row in rows
        )
    if len(hosts) == 1:
        return f"on {rows[0].device} to {rows[-1].device}"
    counts = sorted(set(hosts.values()))
    count = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{count} on each of {len(hosts)} machines, {rows[0].host} to {rows[-1].host}"


def status_rows(rows: Sequence[EngineStatus], work: Mapping[str, tuple[str, str]]) -> list[list[str]]:
    """Return the rows of `%distnb status`, in the order of `STATUS_COLUMNS`.

    Of many engines, the idle ones of a machine share a row without a process id.

    Args:
        work: The work and the content of each task.
    """
    groups: dict[tuple[object, ...], list[EngineStatus]] = {}
    for row in rows:
        key: tuple[object, ...] = (row.engine,)
        if len(rows) > _MOST_ROWS and row.state == "idle" and not any(work.get(row.task, ())):
            key = row.task.rpartition(" ")[0], row.device.partition(":")[0], row.host
        groups.setdefault(key, []).append(row)
    return [_status_row(group, work) for group in groups.values()]


def _status_row(group: Sequence[EngineStatus], work: Mapping[str, tuple[str, str]]) -> list[str]:
    first = group[0]
    pid = str(first.pid) if len(group) == 1 else ""
    names = [_joined([str(row.engine) for row in group]), _joined([row.task for row in group])]
    return [
        *names,
        _joined([row.device for row in group]),
        first.state,
        *work.get(first.task, ("", "")),
        pid,
        first.host,
    ]


def _joined(names: Sequence[str]) -> str:
    """Return names that differ in their number as one: "cuda:0-3, 6" for cuda:0, …"""
    if len(set(names)) == 1:
        return names[0]
    beginning = names[0].rstrip("0123456789")
    return beginning + ", ".join(ranges({int(name.removeprefix(beginning)) for name in names}))
