"""Counts of a program's calls of `strategy.run` and scopes, and the latest error that was raised through one.

An error that one replica catches may have made it skip a collective in which the others wait. Its next collective can
look exactly like theirs: same line, same shape. The counts show the difference. Two replicas run

    for batch in batches:
        try:
            strategy.run(step, args=(batch,))   # step calls all_reduce
        except ValueError:
            pass

and replica 0 raises in the first step, before its all_reduce:

                         replica 0                      replica 1
    run begins           crossed 1                      crossed 1
    the error leaves it  crossed 2, errors 1            (waits in collective 1: errors 0, crossed 1)
    run begins           crossed 3
    all_reduce           collective 1: errors 1, crossed 3

Both call collective 1, but `errors` differs, and so does `crossed`: replica 0 has skipped a collective. Without this
comparison replica 0's second gradient would be added to replica 1's first.
"""

from __future__ import annotations

from distnb.collectives.verify.collective_log import Position
from distnb.errors import ProgramAborted

__all__ = ["ProgramCalls"]


class ProgramCalls:
    """The calls of `run` and the scopes of this replica's program.

    Attributes:
        crossed: The number of times that a call or a scope has begun or ended.
        errors: The number of errors that were raised through a call or a scope, or by a collective that refused its
            arguments.
        error: The latest of these errors, until all replicas have met in a later collective.
        place: A description of the call, scope or collective that this error was raised through.
    """

    def __init__(self) -> None:
        self.begin_program()

    def begin_program(self) -> None:
        """Set the counts to zero."""
        self.crossed = self.errors = 0
        self.error: BaseException | None = None
        self.place = ""

    def cross(self) -> None:
        """Count the beginning or the end of a call or a scope."""
        self.crossed += 1

    def fail(self, place: str, error: BaseException) -> None:
        """Note an error that is raised through `place`: a call, a scope or a collective.

        ProgramAborted is not counted: it carries out the order to end that another replica's error has caused.
        """
        if isinstance(error, ProgramAborted):
            return
        self.errors += 1
        self.error, self.place = error, place

    @property
    def position(self) -> Position:
        """The current counts, for the report of a collective."""
        return Position(self.errors, self.crossed)
