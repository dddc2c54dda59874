"""What the notebook makes of a program's outcome: it raises what ended it, and warns of replicas that drift apart."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from distnb.errors import CollectiveError, CollectiveMismatchError, EngineDied, OptionError, ProgramError, RemoteError
from distnb.notebook.output.wording import ranges
from distnb.notebook.programs.outcome import Outcome
from distnb.objects.placeholder import Placeholder
from distnb.topology import Team
from distnb.wire.messages import ErrorReport

__all__ = ["Failure", "failing_engine", "raise_failure", "reported", "unlike_steps", "warn_of_drift"]

_DRIFTED_SHOWN = 4
_BUSY = (
    "still busy after a second: the next cell works as soon as it has ended (%distnb stacks shows what it is doing; "
    "if it does not end, %distnb restart {engines} starts anew)"
)
_MISMATCH = f"{CollectiveMismatchError.__module__}.{CollectiveMismatchError.__qualname__}"
_UNANSWERED = f"{CollectiveError.__module__}.{CollectiveError.__qualname__}"
_CONSEQUENCES = (_MISMATCH, _UNANSWERED)


@dataclass(frozen=True)
class Failure:
    """A program that failed or was ended, as long as no other one has begun: its replicas keep their frames.

    Attributes:
        error: What was raised in the notebook.
        engine: Whose error it is; None where that one's process has ended.
    """

    error: BaseException
    team: Team
    engine: int | None

    def engine_of(self, replica: int | None) -> int:
        """The engine to look at: a replica's, or the one that failed. OptionError where there is none."""
        if replica is None and self.engine is not None:
            return self.engine
        if replica is not None and replica < self.team.size:
            return self.team.engines[replica]
        there = f"The replicas are {', '.join(ranges(range(self.team.size)))}."
        if replica is not None:
            raise OptionError(f"There is no replica {replica} in the program that failed. {there}")
        raise OptionError(
            "The process of the replica that failed has ended, with all that it held. Another one can be looked at: "
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
    """Raise what ended a program; nothing if it went well.

    Args:
        callers_lines: Draws where an ordinary cell called it, which is shown above the replica's traceback; None for
            a distributed cell.
        opened: Opens an exception that was packed.

    Raises:
        KeyboardInterrupt: The user ended it.
        EngineDied: A process ended, and no replica has a better reason.
        BaseException: The failing replica's own exception, of its own type, with its own traceback. The lowest
            replica's when several raised the same.
    """
    if outcome.ok and not outcome.interrupted:
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
            f"{status} while it ran its part; the other replicas' part was ended, and what lives there is still there. "
            "The next program runs on the engines that are left; %distnb restart --missing starts a replacement."
        )
    raise ProgramError(f"The program was ended: {_others(outcome, team, None)}.")


def failing_engine(outcome: Outcome, team: Team) -> int | None:
    """The engine whose error ended a program; None where none raised one, or a better reason is that one died."""
    errors = {
        engine: reply.error for engine, reply in outcome.replies.items() if reply.status == "error" and reply.error
    }
    if outcome.died:  # then a collective that another replica did not come to is a consequence
        errors = {engine: error for engine, error in errors.items() if error.type_name != _UNANSWERED}
    if not errors:
        return None
    # In order of arrival: the first is the cause, later ones may be its consequences. That replicas do not match any
    # more, or wait for one in vain, is mostly a consequence, too, of what another one raised; and may be told sooner.
    first = min(errors.values(), key=lambda error: error.type_name in _CONSEQUENCES)
    same = [engine for engine, error in errors.items() if error.type_name == first.type_name]
    return min(same, key=team.rank_of)


def _others(outcome: Outcome, team: Team, failed: int | None) -> str:
    """What became of the other replicas, in one line."""
    parts: dict[str, list[int]] = {}
    stuck = [engine for engine in outcome.engines if engine not in outcome.died and engine not in outcome.replies]
    cause = outcome.replies[failed].error if failed is not None else None
    for engine in outcome.engines:
        if engine == failed:
            continue
        reply = outcome.replies.get(engine)
        if engine in outcome.died:
            what = f"died ({outcome.died[engine]})"
        elif reply is None:
            what = _BUSY.format(engines=" ".join(map(str, sorted(stuck))))
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
    """The traceback of another replica whose error is neither the same nor a consequence; empty if there is none."""
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
    """The exception that was reported, which shows the traceback that it had there.

    Args:
        who: Who raised it, at the beginning of a sentence; `within`: in the midst of one.
        others: What else is to be told.
        hint: What is told besides in a notebook.
        second: The lines of another error, shown below it.
    """
    error, *notes = _revive(report, opened)
    title = f"{who} raised:"
    if isinstance(error, SystemExit):  # of which IPython shows no more than this
        others = f"{within} ended by it" + (f"; {others}" if others else "")
    notes = [f"({note})" for note in (*notes, others) if note]
    rendered = [title, *report.rendered, *second, *notes, *([f"({hint})"] if hint else [])]

    def render(self: BaseException) -> list[str]:
        return [*callers_lines(self), *rendered] if callers_lines is not None else rendered

    try:
        # IPython asks the exception itself how it wants to be shown.
        error._render_traceback_ = MethodType(render, error)  # type: ignore[attr-defined]
    except AttributeError:
        pass  # a class with slots; the cause below tells the same
    for note in notes:
        error.add_note(note)
    error.__cause__ = ReplicaTraceback("\n" + "\n".join([title, *report.traceback]))
    return error


def _revive(report: ErrorReport, opened: Callable[[Any], Any]) -> tuple[BaseException, str]:
    """The exception itself, or a stand-in and the reason for it."""
    reason = ""
    if report.pickled is not None:
        try:
            error: Any = pickle.loads(report.pickled) if isinstance(report.pickled, bytes) else opened(report.pickled)
            if isinstance(error, Placeholder):
                error.refuse()
        except Exception as failed:  # noqa: BLE001  # this runs what its class says, which may do anything
            # On the replica it could be read again: something is there that is not here.
            reason = f"It could not be made in the notebook, and is told here: {type(failed).__name__}: {failed}."
        else:
            if isinstance(error, BaseException):
                return error, ""
    return RemoteError(f"{report.type_name}: {report.text}"), reason


def unlike_steps(writes: Mapping[int, Mapping[str, int]]) -> str:
    """Tell of replicas that a failed program left at different steps; "" if their writes are as many.

    Args:
        writes: By replica: how often each model's parameters were written to.
    """
    unlike = []
    for model in dict.fromkeys(model for each in writes.values() for model in each):
        counts = {replica: each[model] for replica, each in sorted(writes.items()) if model in each}
        if len(set(counts.values())) > 1:
            unlike.append(
                f"{model} ({', '.join(f'{count} on replica {replica}' for replica, count in counts.items())})"
            )
    if not unlike:
        return ""
    more = f" and {len(unlike) - _DRIFTED_SHOWN} more" if len(unlike) > _DRIFTED_SHOWN else ""
    return (
        "distnb: the replicas ended at different steps, as the writes to their parameters show: "
        f"{'; '.join(unlike[:_DRIFTED_SHOWN])}{more}. The next strategy.run or scope sets all replicas to what replica "
        "0 holds."
    )


def warn_of_drift(outcome: Outcome) -> None:
    """Warn if what a program changed by hand is not the same on all replicas: a change that only some made, too.

    Replicas that failed do not report their changes. What they left unequal is made equal by the next program.
    """
    if not outcome.ok:
        return
    changed = [reply.changed for _, reply in sorted(outcome.replies.items())]
    names = dict.fromkeys(name for each in changed for name in each)
    unlike = [name for name in names if len({each.get(name) for each in changed}) > 1]
    if not unlike:
        return
    more = f" and {len(unlike) - _DRIFTED_SHOWN} more" if len(unlike) > _DRIFTED_SHOWN else ""
    warnings.warn(
        f"Mirrored variables differ between replicas since this cell: {', '.join(unlike[:_DRIFTED_SHOWN])}{more}. "
        "They were changed by hand, with values of each replica's own. Let an optimizer step them after "
        "loss.backward(), or add up the gradients first: distnb.get_replica_context().all_reduce('sum', gradient). "
        "model.load_state_dict(strategy.broadcast(model.state_dict())) makes them equal again.",
        stacklevel=3,
    )
