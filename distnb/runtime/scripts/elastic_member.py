"""Membership of this process in an elastic script, from generation to generation of its process group.

The launcher publishes the generations (`distnb/cluster/generations.py`). A thread reads them ten times a second or more
often, and ends the collectives of a generation that has lost a member. So the members end together, even if one of them
waits for a member that is alive.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from distnb.cluster.generations import DONE, READY, Generation, Launched, launched
from distnb.cluster.rendezvous_store import free_port
from distnb.collectives.group.groups import groups
from distnb.errors import CollectiveError, CollectiveMismatchError, ContextError, ProgramAborted
from distnb.input import dataset
from distnb.runtime import spmd
from distnb.runtime.this_process import this_process
from distnb.topology import Team, parse_device

__all__ = ["ElasticMember", "become_member"]

_logger = logging.getLogger("distnb.elastic")

_PERIOD_S = 0.05
_LOSS_S = 10.0  # until the launcher has published the loss that made a collective fail
_POLL_S = 0.02

_is_member = False


def become_member() -> ElasticMember | None:
    """Return this process as a member, once; None if no elastic launcher has started it.

    Raises:
        ContextError: It has been a member before.
    """
    global _is_member
    mine = launched()
    if mine is None:
        return None
    if _is_member:
        raise ContextError(
            "A script under `distnb run --min` calls distnb.elastic once: a process that joins later could not know at "
            "which call the others are. Make one function of what the script trains."
        )
    _is_member = True
    return ElasticMember(mine)


class ElasticMember:
    """Membership of this process.

    Attributes:
        is_new: Whether it was started to replace a process that was lost.
    """

    def __init__(self, mine: Launched) -> None:
        self._launched = mine
        self._latest = mine.read()
        self.is_new = mine.number >= self._latest.first
        self._entered: Generation | None = None if self.is_new else self._first(self._latest)
        self._joining = self._is_done = False
        self._aborted = -1
        self._changing = threading.Lock()  # so that an abort never meets the group after the one that it is for
        threading.Thread(target=self._watch, name="distnb-elastic", daemon=True).start()
        mine.report(READY)

    @staticmethod
    def _first(latest: Generation) -> Generation:
        """Return generation 0, in which this process was started."""
        members = tuple(range(latest.first))
        return Generation(number=0, members=members, devices=(), first=latest.first)

    @property
    def must_regroup(self) -> bool:
        """True if there is a newer generation than this process's."""
        return self._latest.number > self._number

    @property
    def _number(self) -> int:
        return -1 if self._entered is None else self._entered.number

    @property
    def is_finished(self) -> bool:
        """True if a process has finished the training."""
        return self._latest.finished

    def done(self) -> None:
        """Report that the training has finished on all members."""
        self._is_done = True
        self._launched.report(DONE)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_done:
            time.sleep(_PERIOD_S)
            with suppress(OSError):
                self._latest = self._launched.read()
            with self._changing:
                self._end_collectives(self._latest)

    def _end_collectives(self, latest: Generation) -> None:
        """End the collectives of a generation that has lost a member, or that nobody else will form."""
        entered = self._entered
        # An abort before the group's forming has begun has no effect, so it is repeated until the joining has ended.
        if entered is None or self._is_done or (entered.number == self._aborted and not self._joining):
            return
        lost = sorted(set(latest.lost).intersection(entered.members))
        if lost or (self._joining and latest.number > entered.number):
            self._aborted = entered.number
            groups.abort(f"Process {', '.join(map(str, lost))} was lost." if lost else "Another process joined.")

    # -- the main thread ---------------------------------------------------------------------------------------------

    def lost_others(self, error: BaseException) -> bool:
        """Return whether an error of the program is the consequence of a lost member, or of the training's end.

        Waits until the launcher knows of it.
        """
        failure = groups.failure()
        if isinstance(error, (KeyboardInterrupt, SystemExit)) or isinstance(failure, CollectiveMismatchError):
            return False
        # The failure may also be an error of this program itself.
        return isinstance(failure, (CollectiveError, ProgramAborted)) and self._await_news()

    def _await_news(self) -> bool:
        entered, until = self._entered, time.monotonic() + _LOSS_S
        assert entered is not None
        while time.monotonic() < until:
            latest = self._latest
            if latest.finished or latest.number > entered.number or set(latest.lost) & set(entered.members):
                return True
            time.sleep(_POLL_S)
        return False

    def join(self) -> None:
        """Wait for the next generation with this process, and form its process group.

        Raises:
            CollectiveError: The group could not be formed, although none of its members was lost.
        """
        groups.program_failed()
        dataset.program_failed()
        while not self.is_finished:
            latest = self._latest
            if latest.number <= self._number or self._launched.number not in latest.members:
                time.sleep(_POLL_S)
                continue
            with self._changing:
                self._entered, self._joining = latest, True
            try:
                self._form(latest)
                return
            except (ProgramAborted, CollectiveError, RuntimeError) as error:
                _logger.info("generation %d was not formed: %s", latest.number, error)
                if not self._await_news():
                    raise
            finally:
                with self._changing:
                    self._joining = False
        if self.is_new and self._entered is None:
            raise SystemExit(0)  # the others have finished without this process

    def _form(self, generation: Generation) -> None:
        rank = generation.members.index(self._launched.number)
        devices = tuple(map(parse_device, generation.devices))
        team = Team(
            engines=generation.members,
            devices=devices,
            generation=generation.number,
            store_host="127.0.0.1",
            store_port=free_port(),
            store_directory=str(self._launched.directory),
        )
        group = groups.rejoin(team, rank, devices[rank])
        process = this_process.replica
        spmd.enter(team, rank, devices[rank], group)
        dataset.program_began()
        assert process is not None, "a script joins its first group before it trains"
        _logger.info("replica %d of %d in generation %d", rank, team.size, generation.number)
