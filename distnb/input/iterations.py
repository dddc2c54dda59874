"""Which iterations over distributed datasets are under way in this process, and which program read them last.

It knows no dataset and loads nothing, so that an engine can ask it before there is one.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol

__all__ = ["Iteration", "end_all", "note", "program_began", "program_failed"]


class Iteration(Protocol):
    """An iteration over a dataset.

    Attributes:
        read_in: `serial` as it was when it was made or read last.
    """

    read_in: int

    def close(self) -> None:
        """End it: threads and workers that read ahead."""

    def cut_short(self) -> None:
        """End it, for good, since replicas may have read different numbers of batches."""


serial = 0
"""Counts the programs of this process."""

_live: weakref.WeakSet[Iteration] = weakref.WeakSet()


def note(iteration: Iteration) -> None:
    """An iteration began."""
    _live.add(iteration)


def program_began() -> None:
    """A program began: what it reads is its own from now on."""
    global serial
    serial += 1


def program_failed() -> None:
    """The program ended half-way: end every iteration that it read, also those that names or tracebacks hold."""
    for iteration in list(_live):
        if iteration.read_in == serial:
            with contextlib.suppress(Exception):  # one that is ending already must not keep the others
                iteration.cut_short()


def end_all() -> None:
    """End every iteration of this process, before the interpreter ends."""
    for iteration in list(_live):
        with contextlib.suppress(Exception):
            iteration.close()
