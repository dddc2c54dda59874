"""The state of a communicator: usable or not, and the error that it raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

from distnb.errors import ProgramAborted
from distnb.story import StateMachine, transition

__all__ = ["CommunicatorState", "EndOrder", "caught"]

EndOrder = Literal["report", "free", "fail parent"]
"""Report the error to the other replicas; free those who wait here; end the group that this one is a part of."""


def caught(undone: str) -> str:
    """Explain why an error ends a program that caught it, with the collective that the error left undone."""
    return f"This error ends the program on every replica, although the program went on after it. {undone}".rstrip()


class CommunicatorState(StateMachine):
    """The state of a communicator::

               fail                  hand_over
        open ────────▶ failed ────────────────────▶ handed over
          │              │                              │
          │ stop         │ retire                       │ retire
          ├──────▶ stopped ──┐                          │
          │ retire       │   │ retire                   │
          └──────────────┴───┴──▶ retired ◀─────────────┘

    - open: its operations may begin.
    - failed: an error ends the program on all replicas. The program here has not received it.
    - handed over: the program has received it. If it calls another collective, it has caught the error, and is ended.
    - stopped: operations raise an error that concerns this replica alone, such as an order to end the program.
    - retired: a new generation has replaced it. Works that have completed stay valid.

    `begin_program` changes none of these: the error is then an earlier program's. A program may begin on connections
    that an earlier one broke, because the notebook requests the next batches before it knows that the current call
    fails. If such a program calls no collective, it succeeds.

    Args:
        failure: The error that keeps the communicator from being formed.

    Attributes:
        phase: The name of the state.
        failure: The error, unless it is open.
        undone: A description of the collective that the error left undone, if the program caught it.
        since: The time of the failure.
        is_earlier: Whether the failure is an earlier program's.
    """

    log = logging.getLogger("distnb.collectives.communicator")

    def __init__(self, failure: BaseException | None = None) -> None:
        super().__init__()
        self.phase: Literal["open", "failed", "handed over", "stopped", "retired"]
        self.phase = "open" if failure is None else "stopped"
        self.failure = failure
        self.undone = ""
        self.since = 0.0
        self.is_earlier = False

    def state(self) -> tuple[str, bool]:
        """Return the phase, and whether the failure is an earlier program's."""
        return self.phase, self.is_earlier

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each invariant that does not hold."""
        if (self.phase == "open") != (self.failure is None):
            yield f"it is {self.phase}, and its failure is {self.failure!r}"
        if self.ends_program and isinstance(self.failure, ProgramAborted):
            yield "an order to end this replica's program counts as an error of all replicas"
        if self.is_earlier and self.failure is None:
            yield "an earlier program's failure is missing"

    @property
    def ends_program(self) -> bool:
        """True if the error ends the program on all replicas."""
        return self.phase in ("failed", "handed over")

    @transition
    def fail(self, error: BaseException, undone: str, handed_over: bool, now: float) -> tuple[EndOrder, ...]:
        """Handle an error that ends the program, which has been `handed_over` to it, or will be."""
        if self.failure is not None:
            return ()
        self.failure, self.undone, self.since = error, undone, now
        if isinstance(error, ProgramAborted):  # each replica gets such an order
            self.phase = "stopped"
            return ("free",)
        self.phase = "handed over" if handed_over else "failed"
        return "report", "free", "fail parent"

    @transition
    def stop(self, error: BaseException, now: float) -> tuple[EndOrder, ...]:
        """Handle an error that concerns this replica alone."""
        if self.failure is None:
            self.phase, self.failure, self.since = "stopped", error, now
        return ("free",)

    @transition
    def hand_over(self, now: float) -> tuple[EndOrder, ...]:
        """Note that the program receives the error."""
        if self.phase == "failed":
            self.phase = "handed over"
        return ()

    @transition
    def retire(self, error: BaseException, now: float) -> tuple[EndOrder, ...]:
        """Handle the replacement of the communicator. Later operations raise the error."""
        self.phase, self.failure = "retired", error
        return ()

    @transition
    def begin_program(self, now: float) -> tuple[EndOrder, ...]:
        """Handle the beginning of a program."""
        self.is_earlier = self.failure is not None
        return ()
