"""Where in its program a replica is: which calls of `run` and scopes it is in, and which of them an error has left.

An error that one replica catches leaves the others waiting in what it skipped. Who waits there can be told, since
regions have numbers, which are the same on all replicas that do the same.
"""

from __future__ import annotations

import weakref

from distnb.collectives.verify.collective_log import CollectiveLog, Departure, Position

__all__ = ["PositionTracker", "Regions"]


class Regions:
    """The calls of `run` and the scopes of this replica, numbered from 1 in each program.

    Attributes:
        error: What left one of them, since the latest collective that all replicas have met in.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.serial = 0
        self.entered: list[int] = []
        self.trackers: weakref.WeakSet[PositionTracker] = weakref.WeakSet()

    def enter(self) -> None:
        """A region begins."""
        self.serial += 1
        self.entered.append(self.serial)

    def leave(self, what: str = "", error: BaseException | None = None) -> None:
        """The innermost region ends, which people call `what`; by an error, if one is given."""
        number = self.entered.pop()
        if error is not None:
            self.error = error
            for tracker in list(self.trackers):
                tracker.leave(number, self.serial, f"{what} by {type(error).__name__}")

    def begin_program(self) -> None:
        """A new program begins."""
        self.error = None
        self.serial = 0
        self.entered.clear()


class PositionTracker:
    """What one process group's next collective tells of where this replica is. It outlives the group's logs.

    Attributes:
        regions: Of this replica.
        log: The group's, while it has one: errors that leave regions are told there at once.
        refused: The arguments of the last collective were refused here.
        text: What the latest error left, for people.
        disturbed: The last collective before which some replica had an error: in which forming of the group, and its
            number; zeros if none had.
    """

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.log: CollectiveLog | None = None
        self.text = ""
        self.forget()
        regions.trackers.add(self)

    def forget(self) -> None:
        """A new program begins, or a new generation."""
        self._low = self._high = 0
        self.refused = False
        self.disturbed = (0, 0)

    @property
    def excused(self) -> bool:
        """Whether this replica had an error since the last collective: others may wait where it does not come."""
        return self._high > 0 or self.refused

    def leave(self, low: int, high: int, text: str) -> None:
        """An error left these regions."""
        self.text = text
        self._low = min(self._low, low) if self._high else low
        self._high = max(self._high, high)
        if (log := self.log) is not None:
            log.set_departure(Departure(number=log.last(log.me), low=self._low, high=self._high, text=text))
            log.tell_soon()

    def take(self) -> Position:
        """What the collective that is posted now tells."""
        entered = self.regions.entered
        outer, inner = (entered[0], entered[-1]) if entered else (0, 0)
        position = Position(low=self._low, high=self._high, outer=outer, inner=inner, serial=self.regions.serial)
        self._low = self._high = 0
        self.refused = False
        return position

    def give_back(self, position: Position) -> None:
        """That collective is posted again, in a group that is formed anew."""
        if position.left:
            self.leave(position.low, position.high, self.text)
