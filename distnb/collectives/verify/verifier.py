"""Finds collectives that do not match, by comparing what each replica posted. Does no communication itself.

Every collective has a number, per process group and replica, beginning with 1. A replica posts its record before it
enters the collective, and then looks at the others' records of the same number. Of two replicas at least one thus sees
the other's record before it enters, so two that differ never meet inside Gloo, which would hang, end the process, or
give wrong sums. Whoever entered first compares later: at its next collective, or while it waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from distnb.collectives.group.regions import Regions, Standing
from distnb.collectives.verify.collective_log import KEY_NBYTES, RING, CollectiveLog, Leaving, Record, Stand
from distnb.collectives.verify.swapped_calls import SwappedCalls, combines
from distnb.errors import CollectiveError, CollectiveMismatchError

__all__ = ["Verifier", "Superseded"]

_ADVICE: Final = (
    "Every replica must call the same collectives, in the same order, with tensors of the same shape and dtype."
)
_ADVICE_ON: Final = {  # by what the names of operations contain
    ".step(": "step() under central storage is taken by all replicas together: each has variables that it updates for "
    "all.",
    ".scope(": "What is made in strategy.scope() is made equal on all replicas, so all of them enter it; what only one "
    "needs is made outside.",
}
_AHEAD: Final = RING - 64
_MISMATCH: Final = "mismatch\0"  # begins a verdict that is one


class Superseded(Exception):
    """Others wait where this replica had an error, and go on in a new group: so does this one, which need not hear.

    Attributes:
        error: What the others hear.
    """

    def __init__(self, error: CollectiveError) -> None:
        super().__init__(str(error))
        self.error = error


class Verifier:
    """The running comparison of this replica's collectives with the others'.

    Not thread-safe: its process group calls it under a lock.

    Args:
        board: Where the replicas post.
        replicas: The replica id of each rank of the process group, for messages.
        warn: Called with the text of a warning and the identity of the call site that it is about.
        standing: Where this replica is in its program.
        breaks: How often the group was formed before in this generation, and broke.

    Attributes:
        half_met: Whether a replica was missed because an error had left where the others met.
    """

    def __init__(
        self,
        board: CollectiveLog,
        replicas: Sequence[int],
        warn: Callable[[str, bytes], None] | None = None,
        standing: Standing | None = None,
        breaks: int = 0,
    ) -> None:
        self.number = 0
        self.program = 0
        self.half_met = False
        self.breaks = breaks
        self._standing = standing or Standing(Regions())
        self._posted = Stand()
        self._excused = False
        self._board = board
        self._replicas = replicas
        self._peers = [rank for rank in range(board.size) if rank != board.me]
        self._compared = [0] * board.size
        self._known: set[bytes] = set()
        # Places that one of two replicas visited while the other was elsewhere: (peer, who, place) -> first number.
        self._visits: dict[tuple[int, int, bytes], int] = {}
        self._crossings = SwappedCalls(warn)
        self._quoted = ""  # of the source, in what was found

    def post(self, record: Record) -> int:
        """Number and post a collective that this replica is about to enter.

        Raises:
            CollectiveMismatchError: Another replica called something else.
            CollectiveError: Another replica left this by an error.
            Superseded: This one left by an error where others wait.
        """
        self.number = number = self.number + 1
        board, standing = self._board, self._standing
        self._excused = standing.excused
        self._posted = stand = standing.take()
        if stand.left:
            board.set_leaving(Leaving(number - 1, stand.low, stand.high, standing.text))
        board.write(number, record, self.program, stand)
        board.advance(number)
        compared = self._compared
        for rank in self._peers:
            # The usual case first: all earlier ones were compared, and this one is the same.
            if compared[rank] == number - 1 and board.same(rank, number):
                compared[rank] = number
            else:
                self._catch_up(rank)
        return number

    @property
    def untold(self) -> bool:
        """Whether something of this replica has yet to be told to the others."""
        return self._board.untold

    def exchange(self) -> None:
        """Tell the others, and hear what they told. Where memory is not shared, that takes round trips."""
        self._board.exchange()

    def check(self) -> None:
        """Compare whatever others have posted since, as far as it is known here.

        Raises:
            CollectiveMismatchError: A replica called something else.
        """
        for rank in self._peers:
            if self._compared[rank] < self.number:
                self._catch_up(rank)
            found = self._board.verdict_of(rank)
            if found:
                differs = found.startswith(_MISMATCH)
                error = CollectiveMismatchError(found.removeprefix(_MISMATCH)) if differs else CollectiveError(found)
                if self._excused:
                    raise Superseded(error)
                self.half_met |= not differs
                raise error

    def tell(self, error: CollectiveError) -> None:
        """Tell the others what was found here; they raise it too, where they wait.

        Source text stays here where it would cross a network.
        """
        text = f"{_MISMATCH if isinstance(error, CollectiveMismatchError) else ''}{error}"
        self._board.set_verdict(text.replace(self._quoted, "") if self._quoted and not self._board.shared else text)
        self._board.publish()

    def entered(self) -> None:
        """The collective that was posted last has been agreed on, and begins: what others find from now on counts."""
        self._excused = False
        if self._posted.left or (self.breaks and self.number == 1):
            self._standing.disturbed = self.breaks, self.number

    def begin_again(self) -> None:
        """What was posted last is posted again, in the group that takes this one's place."""
        self._standing.give_back(self._posted)

    def left(self, low: int, high: int, text: str) -> None:
        """An error left these regions on this replica."""
        self._standing.leave(low, high, text)
        self._board.set_leaving(Leaving(self.number, self._standing.low, self._standing.high, text))
        self._board.tell_soon()

    def room(self) -> bool:
        """Whether the next collective can be posted without overwriting what another replica has yet to compare."""
        number, board = self.number, self._board
        for rank in self._peers:
            if number - self._compared[rank] >= _AHEAD or number - board.told(rank) >= _AHEAD:
                return False
        return True

    def is_new(self, record: Record) -> bool:
        """Whether everyone must have told the same before this replica enters: where memory is not shared, once."""
        if self._board.shared or record.key in self._known:
            return False
        self._known.add(record.key)
        return True

    def agreed(self, number: int) -> bool:
        """Whether all others posted that number, and the same; or there is no way to know any more."""
        return self._board.lost or all(self._compared[rank] >= number for rank in self._peers)

    def absent(self, number: int) -> list[int]:
        """The ranks that have not called the collective of that number yet."""
        return [rank for rank in self._peers if self._board.last(rank) < number]

    def told(self, number: int) -> str:
        """What this replica called under that number, for people."""
        posted = self._board.read(self._board.me, number)
        return f"{posted[0].operation} at {posted[0].place}" if posted else "a collective"

    def retract(self, number: int, error: BaseException) -> None:
        """Say that this replica did not enter the collective after all, since its arguments were refused."""
        posted = self._board.read(self._board.me, number)
        if posted is not None:
            record, program = posted
            reason = f"{record.operation}, which failed with {type(error).__name__}"
            stand = self._board.stand(self._board.me, number)
            self._board.write(number, Record(bytes(KEY_NBYTES), f"{reason[:120]}\0{record.place}"), program, stand)
            self._standing.refused = True

    # -- programs --------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """This replica began a program."""
        self.program = program
        self._crossings.forget()
        self._board.set_phase(program, "running")

    def end(self, failed: bool, whole: bool = True) -> None:
        """This replica's part of the program ended.

        Args:
            failed: Whether by an error.
            whole: Whether the group has not broken: then all have called as many collectives.

        Raises:
            CollectiveMismatchError: It ended well, but called something else than another replica, or another number of
                collectives than one that has ended well too.
        """
        self._board.set_phase(self.program, "failed" if failed else "ended")
        self._board.exchange()
        if failed or not whole or any(self._board.verdict_of(rank) for rank in self._peers):
            return
        try:
            self._compare_ends()
        except Superseded:
            pass  # the others know

    def _compare_ends(self) -> None:
        for rank in self._peers:
            program, phase, last = self._board.phase(rank)
            self._catch_up(rank)
            if program == self.program and phase == "ended":
                if last > self.number and self._has_left(self._board.me, rank, self.number + 1):
                    continue
                if last < self.number and self._has_left(rank, self._board.me, last + 1):
                    continue
                if last > self.number:
                    self._raise_missing(rank, self._board.me, self.number + 1)
                if last < self.number:
                    self._raise_missing(self._board.me, rank, last + 1)

    def check_departed(self, number: int) -> list[int]:
        """Look for replicas that can no longer come to a collective in which this one waits.

        Returns:
            The ranks whose program ended with an error, so that they will not come either; others tell of that error.

        Raises:
            CollectiveMismatchError: A replica ended its program, or went on to the next, without calling it.
        """
        failed = []
        for rank in self._peers:
            self._compare_again(number, rank)
            program, phase, last = self._board.phase(rank)
            if last >= number:
                continue
            if program == self.program and phase == "failed":
                failed.append(rank)
            elif (program == self.program and phase == "ended") or program > self.program:
                # What is waited in may be the second of what takes several.
                self._raise_missing(self._board.me, rank, last + 1 if program == self.program else number)
        return failed

    def departed(self, number: int) -> str:
        """Whether a replica cannot come to a collective in which this one waits, as an error left where it stands.

        Returns:
            The error's text; "" if there is none. If nobody catches the error, the program's end will tell better.
        """
        for rank in self._peers:
            if self._board.last(rank) < number and self._has_left(rank, self._board.me, number):
                return self._left_text(rank, self._board.me, number)
        return ""

    def _has_left(self, rank: int, other: int, number: int) -> bool:
        """Whether an error on one replica left where another one called its collective of that number."""
        leaving = self._board.leaving_of(rank)
        there = self._board.stand(other, number)
        return leaving.number == self._board.last(rank) and Stand(leaving.low, leaving.high).misses(there)

    def _left_text(self, rank: int, waiting: int, number: int) -> str:
        posted, how = self._board.read(waiting, number), self._board.leaving_of(rank).text
        what = f"{posted[0].operation} at {posted[0].place}" if posted else "a collective"
        return (
            f"{self._name(rank).capitalize()} left {how}, and does not come to {what} (collective number {number}), in "
            "which others wait. A program that catches errors catches them on all replicas: what is met next works."
        )

    def check_gone(self) -> list[int]:
        """Look for replicas that cannot come to where the group that takes this one's place is formed.

        Returns:
            Those whose program ended with an error.

        Raises:
            CollectiveMismatchError: One ended its program.
        """
        failed = []
        for rank in self._peers:
            program, phase, _ = self._board.phase(rank)
            if program == self.program and phase == "failed":
                failed.append(rank)
            elif (program == self.program and phase == "ended") or program > self.program:
                raise CollectiveMismatchError(
                    f"{self._name(self._board.me).capitalize()} waits to form a new process group after an error, but "
                    f"{self._name(rank)} finished its program without another collective. {_ADVICE}"
                )
        return failed

    def check_present(self, ranks: Sequence[int]) -> list[int]:
        """Look for replicas that cannot come to where this one waits for them, which is no collective of this group.

        Returns:
            Those whose program ended with an error.

        Raises:
            CollectiveMismatchError: One ended its program.
        """
        failed = []
        for rank in self._peers:
            program, phase, _ = self._board.phase(rank)
            if rank in ranks and program == self.program and phase == "failed":
                failed.append(rank)
            if rank in ranks and ((program == self.program and phase == "ended") or program > self.program):
                here = self._name(self._board.me).capitalize()
                raise CollectiveMismatchError(
                    f"{here} waits to connect a process group of replicas {list(ranks)}, but "
                    f"{self._name(rank)} finished its program without using that group. {_ADVICE}"
                )
        return failed

    # -- comparison ------------------------------------------------------------------------------------------------

    def _catch_up(self, rank: int) -> None:
        board = self._board
        number = self._compared[rank] + 1
        while number <= self.number:
            if not board.same(rank, number):
                other = board.read(rank, number)
                if other is None and board.last(rank) < number:
                    break  # not there yet
                mine = board.read(board.me, number)
                # Where one is overwritten, the replica that came later has compared them.
                if mine is not None and other is not None:
                    self._compare(number, mine, rank, other)
            self._compared[rank] = number
            number += 1

    def _compare_again(self, number: int, rank: int) -> None:
        """A record can change after it was compared: when its replica's arguments were refused."""
        if self._compared[rank] >= number and not self._board.same(rank, number):
            mine, other = self._board.read(self._board.me, number), self._board.read(rank, number)
            if mine is not None and other is not None and mine[0].signature != other[0].signature:
                self._compare(number, mine, rank, other)

    def _compare_stands(self, number: int, rank: int) -> None:
        mine, other = self._board.stand(self._board.me, number), self._board.stand(rank, number)
        if not (mine.left or other.left):
            return
        if other.misses(mine):
            self.half_met = True
            raise CollectiveError(self._left_text(rank, self._board.me, number))
        if mine.misses(other):
            raise Superseded(CollectiveError(self._left_text(self._board.me, rank, number)))
        self._standing.disturbed = max((self.breaks, number), self._standing.disturbed)

    def _compare(self, number: int, mine: tuple[Record, int], rank: int, other: tuple[Record, int]) -> None:
        self._compare_stands(number, rank)
        if mine[0].signature != other[0].signature:
            if self._excused and number < self.number:
                called = f"{self._name(self._board.me).capitalize()} called {mine[0].operation} at {mine[0].place}"
                raise Superseded(CollectiveMismatchError(f"{called} (collective number {number}). {_ADVICE}"))
            self._raise(number, rank, mine[0], other[0], "The replicas called different collectives")
        if mine[1] != other[1]:
            self._raise(number, rank, mine[0], other[0], "The replicas are in different cells, one of them late")
        if mine[0].key == other[0].key or not combines(mine[0]):
            return
        if mine[0].line != other[0].line:
            self._compare_order(number, mine[0], rank, other[0], lambda record: record.line)
        elif mine[0].chain != other[0].chain:
            self._compare_order(number, mine[0], rank, other[0], lambda record: record.chain)
        earlier = self._crossings.crossed(number, mine[0], rank, other[0])
        if earlier is not None:
            self._raise_swapped(self._board.me, number, rank, earlier, mine[0])
        if self._board.me == 0:  # of any two replicas that differ, one differs from this one
            them = functools.partial(self._who_called, number, other[0])
            self._crossings.suspect(mine[0], self._replicas[0], other[0], them)

    def _compare_order(
        self, number: int, mine: Record, rank: int, other: Record, place: Callable[[Record], bytes]
    ) -> None:
        """Two replicas are at different places with equal collectives.

        That is fine if each place belongs to one of them (`if rank == 0: … else: …`). A place that both visit, but
        with different numbers, tells of an order that differs, and of sums over unlike things.
        """
        me = self._board.me
        for record, here, there in ((mine, me, rank), (other, rank, me)):
            # `here` is at this place now; has `there` been at it before, while `here` was elsewhere?
            earlier = self._visits.get((rank, there, place(record)))
            if earlier is not None:
                self._raise_swapped(here, number, there, earlier, record)
        self._visits.setdefault((rank, me, place(mine)), number)
        self._visits.setdefault((rank, rank, place(other)), number)

    def _who_called(self, number: int, record: Record) -> list[int]:
        posted = [(rank, self._board.read(rank, number)) for rank in self._peers]
        return [self._replicas[rank] for rank, found in posted if found is not None and found[0].key == record.key]

    # -- errors ----------------------------------------------------------------------------------------------------

    def _name(self, rank: int) -> str:
        return f"replica {self._replicas[rank]}"

    def _raise(self, number: int, rank: int, mine: Record, other: Record, what: str) -> None:
        both = sorted([(self._replicas[self._board.me], mine), (self._replicas[rank], other)], key=lambda pair: pair[0])
        told = "; ".join(f"replica {replica} called {record.operation} at {record.place}" for replica, record in both)
        raise CollectiveMismatchError(
            f"{what}: {told} (collective number {number}). {_advice(*(record for _, record in both))}"
        )

    def _raise_swapped(self, here: int, number: int, there: int, earlier: int, record: Record) -> None:
        first, second = sorted([(self._replicas[here], number), (self._replicas[there], earlier)])
        self._quoted = _as(record)
        raise CollectiveMismatchError(
            f"The replicas called their collectives in a different order: {record.operation}{self._quoted} at "
            f"{record.place} was collective number {first[1]} on replica {first[0]} and number {second[1]} on replica "
            f"{second[0]}, so unlike things were put together. {_ADVICE}"
        )

    def _raise_missing(self, present: int, missing: int, number: int) -> None:
        posted = self._board.read(present, number)
        what = f"{posted[0].operation} at {posted[0].place}" if posted else "a collective"
        cure = _advice(posted[0]) if posted else _ADVICE
        raise CollectiveMismatchError(
            f"{self._name(present).capitalize()} called {what} (collective number {number}), but "
            f"{self._name(missing)} finished its program after {number - 1} collectives without calling it. {cure}"
        )


def _as(record: Record) -> str:
    return f", called as `{record.words}`," if record.words else ""


def _advice(*called: Record) -> str:
    """The cure, where replicas called these instead of one thing."""
    operations = [record.operation for record in called]
    return next((cure for part, cure in _ADVICE_ON.items() if any(part in each for each in operations)), _ADVICE)
