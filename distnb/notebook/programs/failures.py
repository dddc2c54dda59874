"""Errors and warnings from a program's outcome: the error that ended it, and a warning if replicas drift apart."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from distnb.errors import CollectiveError, CollectiveMismatchError, EngineDied, OptionError, ProgramError, RemoteError
from distnb.notebook.programs.outcome import Outcome
from distnb.objects.placeholder import Placeholder
from distnb.runtime.consistency.drift import differences
from distnb.runtime.this_process import this_process
from distnb.topology import Team
from distnb.views.wording import ranges
from distnb.wire.messages import ErrorReport

__all__ = ["Failure", "failing_engine", "raise_failure", "reported", "step_difference", "warn_of_drift"]

_DRIFTED_SHOWN = 4
_BUSY = (
    "still busy after a second: the next cell works as soon as it has ended (%distnb stacks shows what it is doing; "
    "if it does not end, replace it with %distnb restart {engines})"
)
_MISMATCH = f"{CollectiveMismatchError.__module__}.{CollectiveMismatchError.__qualname__}"
_UNANSWERED = f"{CollectiveError.__module__}.{CollectiveError.__qualname__}"
_CONSEQUENCES = (_MISMATCH, _UNANSWERED)


@dataclass(frozen=True)
class Failure:
    """A program that failed or was ended. Its replicas keep their frames until the next program begins.

    Attributes:
        error: The exception that was raised in the notebook.
        engine: The engine that raised it; None if its process has ended.
    """

    error: BaseException
    team: Team
    engine: int | None

    def engine_of(self, replica: int | None) -> int:
        """Return the engine to debug: the given replica's, or the one that failed.

        Raises:
            OptionError: There is no such engine.
        """
        if replica is None and self.engine is not None:
            return self.engine
        if replica is not None and replica < self.team.size:
            return self.team.engines[replica]
        there = f"The replicas are {', '.join(ranges(range(self.team.size)))}."
        if replica is not None:
            raise OptionError(f"There is no replica {replica} in the program that failed. {there}")
        raise OptionError(
            "The process of the replica that failed has ended, and its frames are lost. Debug another replica: "
            f"%distnb debug --replica N. {there}"
        )


class ReplicaTraceback(Exception):
    """The replica's own traceback, as the cause of the error raised in the notebook: plain Python shows it first."""

    def __str__(self) -> str:
        return str(self.args[0])


def raise_failure(
    outcome: Outcome,
    team: Team,
    *,
    callers_lines: Callable[[BaseException], list[str]] | None = None,
    opened: Callable[[Any], Any] = pickle.loads,
) -> None:
    """Raise the error that ended a program, or return if the program succeeded.

    Args:
        callers_lines: Returns the lines that show the call in an ordinary cell, above the replica's traceback. None for
            a distributed cell.
        opened: Opens an exception that was packed.

    Raises:
        KeyboardInterrupt: The user ended the program.
        EngineDied: A process ended, and no replica reports a better reason.
        BaseException: The failing replica's own exception, with its type and traceback. If several replicas raised
            the same, that of the lowest replica.
    """
    if outcome.ok and not outcome.stopped:
        return
    if outcome.interrupted:
        raise KeyboardInterrupt(_others(outcome, team, None) or "every replica ended its part")
    engine = failing_engine(outcome, team)
    if engine is not None:
        report = outcome.replies[engine].error
        assert report is not None
        _raise(
            report, team, engine, _others(outcome, team, engine), _second(outcome, team, report), callers_lines, opened
        )
    if outcome.died:
        engine, status = next(iter(outcome.died.items()))
        raise EngineDied(
            f"Engine {engine} (replica {team.rank_of(engine)} of {team.size}, {team.devices[team.rank_of(engine)]}) "
            f"{status} while it ran its part; the other replicas' parts were ended, and their objects are kept. "
            "The next program runs on the remaining engines; %distnb restart --missing starts a replacement."
        )
    raise ProgramError(f"The program was ended: {_others(outcome, team, None)}.")


def failing_engine(outcome: Outcome, team: Team) -> int | None:
    """Return the engine whose error ended a program; None if no engine raised one, or if a death is the reason."""
    errors = {
        engine: reply.error for engine, reply in outcome.replies.items() if reply.status == "error" and reply.error
    }
    if outcome.died:  # then a collective that another replica did not join is a consequence
        errors = {engine: error for engine, error in errors.items() if error.type_name != _UNANSWERED}
    if not errors:
        return None
    # In order of arrival: the first error is the cause, and later ones may be its consequences. A mismatch between
    # replicas, or a collective without an answer, is mostly a consequence too, although its report may arrive first.
    # Example: replica 0 raises ValueError before an all_reduce in which replica 1 waits.
    first = min(errors.values(), key=lambda error: error.type_name in _CONSEQUENCES)
    same = [engine for engine, error in errors.items() if error.type_name == first.type_name]
    return min(same, key=team.rank_of)


def _others(outcome: Outcome, team: Team, failed: int | None) -> str:
    """Return the states in which the other replicas ended, in one line."""
    parts: dict[str, list[int]] = {}
    cause = outcome.replies[failed].error if failed is not None else None
    for engine in outcome.engines:
        if engine == failed:
            continue
        reply = outcome.replies.get(engine)
        if engine in outcome.died:
            what = f"died ({outcome.died[engine]})"
        elif reply is None:
            what = _BUSY.format(engines=" ".join(map(str, sorted(outcome.stuck))))
        elif reply.error is not None:
            same = cause is not None and (cause.type_name, cause.text) == (reply.error.type_name, reply.error.text)
            what = "raised the same" if same else f"raised {reply.error.type_name}: {_shortened(reply.error.text)}"
        elif reply.status == "ok":
            what = "finished"
        else:
            what = "ended with it" if failed is not None else "ended"
        parts.setdefault(what, []).append(team.rank_of(engine))
    return "; ".join(
        f"{'replica' if len(ranks) == 1 else 'replicas'} {', '.join(ranges(ranks))} {what}"
        for what, ranks in parts.items()
    )


def _second(outcome: Outcome, team: Team, first: ErrorReport) -> list[str]:
    """Return the traceback of another replica if its error is neither the same nor a consequence, else []."""
    for engine, reply in sorted(outcome.replies.items()):
        error = reply.error
        if error is None or error.type_name in _CONSEQUENCES or error.rendered == first.rendered:
            continue
        if (error.type_name, error.text) != (first.type_name, first.text):
            return [f"{_who(team, engine)} raised:", *error.rendered]
    return []


def _who(team: Team, engine: int) -> str:
    rank = team.rank_of(engine)
    return f"Replica {rank} of {team.size} ({team.devices[rank]})"


def _shortened(text: str, most: int = 120) -> str:
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= most else line[: most - 1] + "…"


def _raise(
    report: ErrorReport,
    team: Team,
    engine: int,
    others: str,
    second: list[str],
    callers_lines: Callable[[BaseException], list[str]] | None,
    opened: Callable[[Any], Any],
) -> None:
    who = _who(team, engine)
    within = who.replace("Replica", "replica", 1)
    hint = "%debug opens a debugger there; the variables are kept until the next program."
    raise reported(report, who, within, others, callers_lines, opened, hint, second)


def reported(
    report: ErrorReport,
    who: str,
    within: str,
    others: str = "",
    callers_lines: Callable[[BaseException], list[str]] | None = None,
    opened: Callable[[Any], Any] = pickle.loads,
    hint: str = "",
    second: Sequence[str] = (),
) -> BaseException:
    """Return the reported exception, which shows the traceback that it had on the replica.

    Args:
        who, within: The name of the replica that raised it, for the beginning and for the middle of a sentence.
        others: A note on the other replicas.
        hint: A further note, shown in a notebook only.
        second: The lines of another error, shown below it.
    """
    error, *notes = _rebuild(report, opened)
    notes.append(this_process.cure_for(error))
    title = f"{who} raised:"
    if isinstance(error, SystemExit):  # IPython shows only the traceback below it
        others = f"{within} ended by it" + (f"; {others}" if others else "")
    notes = [f"({note})" for note in (*notes, others) if note]
    rendered = [title, *report.rendered, *second, *notes, *([f"({hint})"] if hint else [])]

    def render(self: BaseException) -> list[str]:
        return [*callers_lines(self), *rendered] if callers_lines is not None else rendered

    try:
        # IPython calls this method of an exception to display it.
        error._render_traceback_ = MethodType(render, error)  # type: ignore[attr-defined]
    except AttributeError:
        pass  # a class with slots; the cause below has the same text
    for note in notes:
        error.add_note(note)
    error.__cause__ = ReplicaTraceback("\n" + "\n".join([title, *report.traceback]))
    return error


def _rebuild(report: ErrorReport, opened: Callable[[Any], Any]) -> tuple[BaseException, str]:
    """Return the exception itself and "", or a RemoteError in its place and the reason for that."""
    reason = ""
    if report.pickled is not None:
        try:
            error: Any = pickle.loads(report.pickled) if isinstance(report.pickled, bytes) else opened(report.pickled)
            if isinstance(error, Placeholder):
                error.refuse()
        except Exception as failed:  # noqa: BLE001  # unpickling runs code of the exception's class, which may raise anything
            # The replica could unpickle it, so the notebook lacks something that the replica has.
            reason = f"The exception could not be opened in the notebook: {type(failed).__name__}: {failed}."
        else:
            if isinstance(error, BaseException):
                return error, ""
    return RemoteError(f"{report.type_name}: {report.text}"), reason


def step_difference(writes: Mapping[int, Mapping[tuple[str, Any], int]]) -> str:
    """Return a notice about replicas that a failed program left at different steps; "" if the numbers of writes agree.

    Args:
        writes: The number of writes to the parameters of each model, by replica, and by the model's description, which
            several models may share, and identity.
    """
    unlike = []
    for model in dict.fromkeys(model for each in writes.values() for model in each):
        counts = {replica: each[model] for replica, each in sorted(writes.items()) if model in each}
        if len(set(counts.values())) > 1:
            unlike.append(
                f"{model[0]} ({', '.join(f'{count} on replica {replica}' for replica, count in counts.items())})"
            )
    if not unlike:
        return ""
    more = f" and {len(unlike) - _DRIFTED_SHOWN} more" if len(unlike) > _DRIFTED_SHOWN else ""
    return (
        "distnb: the replicas ended at different steps, as the writes to their parameters show: "
        f"{'; '.join(unlike[:_DRIFTED_SHOWN])}{more}. The next strategy.run or scope copies replica 0's values to "
        "all replicas."
    )


def warn_of_drift(outcome: Outcome, label: str) -> None:
    """Warn about mirrored variables that a program changed by hand in different ways, or only on some replicas.

    Replicas that failed do not report their changes. The next program makes all replicas equal again.
    """
    if not outcome.ok:
        return
    changed = [reply.changed for _, reply in sorted(outcome.replies.items())]
    if text := differences(changed, since="since this cell"):
        warnings.warn_explicit(text, UserWarning, label, 1)  # names the cell, not the line of distnb that called this
