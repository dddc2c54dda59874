"""Which replica of several this process is, if it is one. Loads no torch: a process without it is none.

An engine is the replica of the program that it runs; a script under torchrun or `distnb run` is one for as long as it
lives (see `spmd.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["become", "replica"]

_replica: SpmdProcess | None = None


def replica() -> SpmdProcess | None:
    """What this process is; None when it is no replica of several."""
    return _replica


def become(replica: SpmdProcess) -> None:
    """From now on this process is a replica."""
    global _replica
    _replica = replica
