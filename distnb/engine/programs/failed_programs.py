"""Programs that failed on this engine: the error that is reported, and the frames that a debugger can show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from distnb.collectives.group.memberships import memberships
from distnb.engine.debugging import debugger, error_reports
from distnb.engine.debugging.console import Console
from distnb.engine.debugging.kept import KeptFailure
from distnb.engine.guard import Guard
from distnb.engine.output import telemetry
from distnb.engine.programs.program_kinds import ProgramKind
from distnb.errors import CollectiveError, ProgramAborted
from distnb.input import dataset as datasets
from distnb.objects.packing import Packed
from distnb.wire.messages import ErrorReport, PostMortem, Reply

__all__ = ["FailedPrograms"]

_DRAWING_S = 0.7  # the time that each of several failed replicas has to report its error
_DRAWING_CAUSE_S = 0.9  # just below the time that the notebook waits for a program that it has ordered to end


class FailedPrograms:
    """The failure of the latest program, and its report.

    Args:
        guard: The guard, under which errors are drawn, since that runs user code.
        console: The replica's console, where a debugger asks.
        running: Returns the number of the running program and this engine's replica number in it, or None.
        pack_error: Packs an exception with all that it holds.
        show_figures: Shows the figures that were drawn at the debugger's prompt.

    Attributes:
        who: This replica's name in the latest program.
    """

    def __init__(
        self,
        guard: Guard,
        console: Console,
        running: Callable[[], tuple[int, int] | None],
        pack_error: Callable[[BaseException], Packed],
        show_figures: Callable[[], None],
    ) -> None:
        self._guard = guard
        self._console = console
        self._running = running
        self._pack_error = pack_error
        self._show_figures = show_figures
        self._kept: KeptFailure | None = None
        self.who = ""

    @property
    def replica(self) -> int:
        """The replica number in the program whose failure is kept."""
        return self._kept.replica if self._kept is not None else 0

    @property
    def where(self) -> str:
        """The place in the user's code where the latest program failed, as text; "" if none is known."""
        return telemetry.where_it_failed(self._kept.error) if self._kept is not None else ""

    def _forget(self) -> None:
        self._kept = None

    def make_room(self, kind: ProgramKind) -> None:
        """Release the frames of an earlier failure before a program, unless the program shows them."""
        if self._kept is not None and kind.drops_failure:
            # Releasing a failed cell's objects may take seconds: a DataLoader waits for workers.
            self._guard.release(self._forget)

    def limit(self, kind: ProgramKind) -> None:
        """Release what need not be kept of a program that has just failed, after its reply was sent."""
        if self._kept is not None and not self._kept.text:
            self._guard.release(self._kept.limit if kind.keeps_failure else self._forget)

    def reply(self, program: int, error: BaseException, value: Any = None, *, alone: bool = False) -> Reply:
        """Return the reply of a program that raised. With `alone` the error is not packed with the namespace."""
        datasets.program_failed()
        cause, reason = memberships.pop_cause()
        # Report the cause instead of its consequence: a wait in C++ that was ended only raises a RuntimeError.
        if cause is not None and cause is not error and not self._guard.interrupted:
            in_c = type(error) is RuntimeError and isinstance(cause, CollectiveError)
            if in_c or self._guard.aborted or isinstance(error, ProgramAborted):
                if not in_c:
                    cause.add_note(reason)
                error = cause.with_traceback(cause.__traceback__ or error.__traceback__)
        running, stopped = self._running(), self._console.stopped_in
        frames = stopped[1] if stopped is not None and stopped[0] is error else None
        replica = running[1] if running is not None else 0
        self._kept = KeptFailure(who=self.who, replica=replica, error=error, stopped_in=frames)
        report = None
        if error is cause or not self._guard.aborted:
            try:
                report = self._report(program, error, None if alone else self._pack_error)
            except (KeyboardInterrupt, ProgramAborted):
                pass  # the error's __str__ is user code, too, and the order ended it
        if report is None or self._guard.interrupted:
            return Reply(program=program, status="interrupted" if self._guard.interrupted else "aborted", value=value)
        return Reply(program=program, status="error", error=report, value=value)

    def _report(
        self, program: int, error: BaseException, pack: Callable[[BaseException], Packed] | None
    ) -> ErrorReport:
        draw = partial(error_reports.report, error, pack)
        if self._guard.aborted:
            return self._guard.call_last(draw, _DRAWING_CAUSE_S)
        return self._guard.call(program, draw, _DRAWING_S)

    def post_mortem(self, message: PostMortem, replica: int) -> Reply:
        """Open a debugger's prompt in the frames that are kept."""
        kept = self._kept
        traceback = kept.traceback if kept is not None else None
        if kept is None or traceback is None:
            return Reply(program=message.program, status="ok", value=False)
        self._console.write(f"{kept.who[:1].upper()}{kept.who[1:]} as it ended. {kept.text} q leaves.\n")
        try:
            self._guard.call(
                message.program,
                lambda: debugger.post_mortem(self._console, kept.who, traceback, self._show_figures),
            )
            return Reply(program=message.program, status="ok", value=True)
        except BaseException as error:  # noqa: BLE001  # whatever user code raises is reported, and the engine lives on
            reply = self.reply(message.program, error)
            self._kept = kept
            return reply
