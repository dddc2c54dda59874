"""A command of `distnb` in a terminal. Features add theirs at the extension point "commands"."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Command"]


class Command(NamedTuple):
    """A command.

    Attributes:
        name: The word after `distnb`.
        about: The line about it in the help of `distnb`.
        run: Runs it, given the further words. Returns the exit code.
    """

    name: str
    about: str
    run: Callable[..., int]
