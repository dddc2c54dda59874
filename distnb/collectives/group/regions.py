"""Where in its program a replica is: which calls of `run` and scopes it is in, and which of them an error has left.

An error that one replica catches leaves the others waiting in what it skipped. Who waits there can be told, since
regions have numbers, which are the same on all replicas that do the same.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from distnb.collectives.verify.collective_log import Stand

__all__ = ["Regions", "Standing"]


class _Leaver(Protocol):
    def left(self, low: int, high: int, text: str) -> None:
        """An error left these regions."""


class Regions:
    """The calls of `run` and the scopes of this replica, numbered from 1 in each program."""

    def __init__(self) -> None:
        self.serial = 0
        self.entered: list[int] = []
        self._groups: weakref.WeakSet[_Leaver] = weakref.WeakSet()

    def tell(self, group: _Leaver) -> None:
        """Tell a process group of errors that leave regions."""
        self._groups.add(group)

    def enter(self) -> None:
        """A region begins."""
        self.serial += 1
        self.entered.append(self.serial)

    def leave(self, what: str = "", error: BaseException | None = None) -> None:
        """The innermost region ends.

        Args:
            what: What it is, for people.
            error: What ends it, if it is an error.
        """
        number = self.entered.pop()
        if error is not None:
            for group in list(self._groups):
                group.left(number, self.serial, f"{what} by {type(error).__name__}")

    def begin_program(self) -> None:
        """A new program begins."""
        self.serial = 0
        self.entered.clear()


class Standing:
    """What one process group's next collective will tell of where this replica is; it outlives ledgers.

    Attributes:
        excused: This replica had an error since the last collective: others may wait where it does not come.
        text: What the latest error left, for people.
        disturbed: The last collective before which some replica had an error: in which forming of the group, and its
            number; zeros if none had.
    """

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.low = self.high = 0
        self.refused = False
        self.text = ""
        self.disturbed = (0, 0)

    @property
    def excused(self) -> bool:
        return self.high > 0 or self.refused

    def leave(self, low: int, high: int, text: str) -> None:
        """An error left these regions."""
        self.text = text
        self.low = min(self.low, low) if self.high else low
        self.high = max(self.high, high)

    def take(self) -> Stand:
        """What the collective that is posted now tells."""
        entered = self.regions.entered
        outer, inner = (entered[0], entered[-1]) if entered else (0, 0)
        stand = Stand(self.low, self.high, outer, inner, self.regions.serial)
        self.low = self.high = 0
        self.refused = False
        return stand

    def give_back(self, stand: Stand) -> None:
        """That collective is posted again, in a group that is formed anew."""
        if stand.left:
            self.leave(stand.low, stand.high, self.text)

    def forget(self) -> None:
        """A new program begins, or a new generation."""
        self.low = self.high = 0
        self.refused = False
        self.disturbed = (0, 0)
