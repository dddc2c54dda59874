"""What `%distnb status` tells of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distnb.cluster.lifecycle import Cluster
from distnb.wire.messages import Hello

__all__ = ["EngineStatus", "status_of"]


@dataclass(frozen=True)
class EngineStatus:
    """One row of `%distnb status`.

    Attributes:
        state: "idle", "busy" (with a program that was ended and goes on), or how the process ended.
    """

    engine: int
    device: str
    pid: int
    host: str
    state: str


def status_of(cluster: Cluster, hellos: Mapping[int, Hello], stuck: Mapping[int, int]) -> tuple[EngineStatus, ...]:
    """What each engine of a cluster is, and does.

    Args:
        hellos: What the engines said of themselves.
        stuck: Those that are busy with a program that was ended, and its number.
    """
    rows = []
    for engine, process in cluster.engines.items():
        state = process.ended or (f"busy with program {stuck[engine]}, which was ended" if engine in stuck else "idle")
        hello = hellos.get(engine)
        pid, host = (hello.pid, hello.host) if hello else (process.pid, cluster.launcher.host(engine))
        rows.append(EngineStatus(engine, str(process.device), pid, host, state))
    return tuple(rows)
