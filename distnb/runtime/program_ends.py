"""Functions to call whenever a program ends in this process: a cell of the notebook, or a replica's part of one.

A module registers its function when it first has something to release at a program's end.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["at_program_end", "program_ended"]

_functions: list[Callable[[], object]] = []


def at_program_end(function: Callable[[], object]) -> None:
    """Call a function at the end of this program and of each later one."""
    _functions.append(function)


def program_ended() -> None:
    """Call the functions. A notebook also calls this before it sends a cell, which may need what they release."""
    for function in _functions:
        function()
