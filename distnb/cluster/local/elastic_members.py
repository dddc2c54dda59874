"""The membership of an elastic script: which processes train together, and which are started. Without IO.

A process sets up (imports, makes its models) and then reports that it is ready to train::

    started ──ready──▶ waits ──next generation──▶ member ──done──▶ (the script's end)
       │                 │                           │
       └────── ends ─────┴─▶ another is started ◀────┴── killed: the other members form the next generation

The processes that start together are members from the beginning: generation 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from distnb.cluster.generations import Generation
from distnb.story import StateMachine, transition

__all__ = ["Dismiss", "ElasticMembers", "End", "Order", "Publish", "Start", "Notify"]

_PAUSE_S = 1.0  # until a lost process is replaced: its device's memory is free by then
_TRIES = 3  # processes of one seat in a row that are lost early
_EARLY_S = 60.0  # after a process has joined


class Start(NamedTuple):
    """The order to start a process. Its number is the next one.

    Attributes:
        number: The number.
        seat: Its device's place among the devices.
    """

    number: int
    seat: int


class Publish(NamedTuple):
    """The order to publish a generation."""

    generation: Generation


class Dismiss(NamedTuple):
    """The order to end processes that are no longer needed."""

    numbers: tuple[int, ...]


class Notify(NamedTuple):
    """The order to print a notice."""

    text: str


class End(NamedTuple):
    """The order to end the script.

    Attributes:
        number: The process whose exit status is the script's; None if all have succeeded.
        reason: The reason, if it is not that process's error.
    """

    number: int | None
    reason: str = ""


Order = Start | Publish | Dismiss | Notify | End


class ElasticMembers(StateMachine):
    """The processes of an elastic script. Each event returns orders.

    Args:
        devices: The device of each seat. There are never more processes than seats.
        minimum: The smallest number of processes that train.
        limit_s: The time for which there may be fewer.
    """

    log = logging.getLogger("distnb.cluster.elastic")

    def __init__(self, devices: Sequence[str], minimum: int, limit_s: float) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self._minimum = minimum
        self._limit_s = limit_s
        self._seats = {number: number for number in range(len(devices))}  # of running processes, by their numbers
        self._first = len(devices)
        self._next = len(devices)
        self._members = list(self._seats)
        self._ready: set[int] = set()
        self._lost: list[int] = []
        self._succeeded: set[int] = set()
        self._starts: dict[int, float] = {}  # when a process is started, by its seat
        self._tries = [0] * len(devices)
        self._joined: dict[int, float] = {}  # when processes that replaced others became members
        self._generation = 0
        self._finished = False
        self._short_since: float | None = None

    def state(self) -> str:
        waiting = sorted(set(self._seats) - set(self._members))
        return (
            f"generation {self._generation} of {self._members}, new {waiting}, ready {sorted(self._ready)}, lost "
            f"{self._lost}{', finished' * self._finished}"
        )

    def violations(self) -> list[str]:
        lines = []
        if len(self._seats) + len(self._starts) > len(self._devices):
            lines.append("there are more processes than devices")
        if not set(self._members) <= set(self._seats) | self._succeeded:
            lines.append("a member does not run")
        return lines

    @property
    def published(self) -> Generation:
        """The generation as the processes should see it now."""
        return Generation(
            number=self._generation,
            members=tuple(self._members),
            devices=tuple(self._devices[self._seats[number]] for number in self._members if number in self._seats),
            lost=tuple(self._lost),
            first=self._first,
            finished=self._finished,
        )

    @property
    def deadline(self) -> float | None:
        """The time of the next call of `tick`, or None."""
        times = [*self._starts.values()]
        if self._short_since is not None:
            times.append(self._short_since + self._limit_s)
        return min(times, default=None)

    # -- events ------------------------------------------------------------------------------------------------------

    @transition
    def ready(self, number: int, now: float) -> list[Order]:
        """Handle a process that is ready to train."""
        self._ready.add(number)
        return self._regroup(now) if number in self._seats and number not in self._members else []

    @transition
    def done(self, number: int, now: float) -> list[Order]:
        """Handle a process that has finished the training. From now on the script is an ordinary one."""
        if self._finished:
            return []
        self._finished, self._short_since = True, None
        self._starts.clear()
        new = tuple(number for number in self._seats if number not in self._members)
        for each in new:
            del self._seats[each]
        return [Publish(self.published), *([Dismiss(new)] if new else [])]

    @transition
    def failed(self, number: int, now: float) -> list[Order]:
        """Handle a process whose program ended with an error. A new one is replaced, since the others can train on."""
        if number not in self._seats:
            return []
        return [End(number)] if number in self._members else self._new_one_ended(number, now)

    @transition
    def killed(self, number: int, now: float) -> list[Order]:
        """Handle a process that a signal ended."""
        if number not in self._seats:
            return []
        if number not in self._members:
            return self._new_one_ended(number, now)
        if self._finished or (self._generation == 0 and not self._ready.issuperset(self._members)):
            return [End(number)]
        self._members.remove(number)
        if now - self._joined.get(number, -_EARLY_S) >= _EARLY_S:
            self._tries[self._seats[number]] = 0
        orders = self._replace(number, now)
        if not self._members:
            return [End(number, "No process is left that has the state of the training in memory.")]
        return [*orders, *self._regroup(now)]

    @transition
    def succeeded(self, number: int, now: float) -> list[Order]:
        """Handle a process that exited with code 0."""
        if number in self._members:
            self._succeeded.add(number)
        else:
            self._seats.pop(number, None)
        return [End(None)] if self._succeeded.issuperset(self._members) else []

    @transition
    def tick(self, now: float) -> list[Order]:
        """Start processes that are due, and end the script if too few have been left for too long."""
        orders: list[Order] = []
        for seat in [seat for seat, at in self._starts.items() if at <= now]:
            del self._starts[seat]
            self._seats[self._next] = seat
            orders.append(Start(self._next, seat))
            self._next += 1
        if self._short_since is not None and now >= self._short_since + self._limit_s:
            return [self._too_few(f"for {self._limit_s:g} s")]
        return orders

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _new_one_ended(self, number: int, now: float) -> list[Order]:
        self._tries[self._seats[number]] += 1
        orders = self._replace(number, now)
        if self._short_since is not None and not self._starts and len(self._seats) < self._minimum:
            orders.append(self._too_few("and no other can be started"))
        return orders

    def _replace(self, number: int, now: float) -> list[Order]:
        """Start another process instead of a lost one, unless those on its device were lost early."""
        seat = self._seats.pop(number)
        self._lost.append(number)
        tries = self._tries[seat] = self._tries[seat] + (number in self._joined)
        if tries >= _TRIES:
            return [
                Notify(f"{tries} processes in a row on {self._devices[seat]} were lost early, so no other is started.")
            ]
        self._starts[seat] = now + _PAUSE_S * 2**tries
        return []

    def _regroup(self, now: float) -> list[Order]:
        """Form the next generation of the members and the new processes that are ready, if they are enough."""
        new = sorted(number for number in self._seats if number in self._ready and number not in self._members)
        if len(self._members) + len(new) < self._minimum:
            self._short_since = self._short_since or now
            count = len(self._members) + len(new)
            return [
                Publish(self.published),
                Notify(
                    f"{_processes(count)} of at least {self._minimum} {_is(count)} left: the training waits for others."
                ),
            ]
        self._short_since = None
        self._members += new
        self._generation += 1
        self._joined.update(dict.fromkeys(new, now))
        size = len(self._members)
        joined = f"Process {', '.join(map(str, new))} joined. " if new else ""
        return [Publish(self.published), Notify(f"{joined}{_processes(size)} train{'s' * (size == 1)}.")]

    def _too_few(self, how: str) -> End:
        last = self._lost[-1]
        return End(last, f"Fewer than {self._minimum} processes were left {how}.")


def _processes(n: int) -> str:
    return f"{n} process{'es' * (n != 1)}"


def _is(n: int) -> str:
    return "is" if n == 1 else "are"
