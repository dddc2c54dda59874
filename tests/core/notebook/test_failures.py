"""The notebook's exception for a replica's exception."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from distnb.errors import CollectiveError, EngineDied, RemoteError
from distnb.notebook.programs.failures import raise_failure, step_difference, warn_of_drift
from distnb.notebook.programs.outcome import Outcome
from distnb.topology import Device, Team
from distnb.wire.messages import ErrorReport, Reply

TEAM = Team(engines=(0, 1), devices=(Device("cpu"),) * 2, generation=1, store_host="", store_port=0)


def report(error: BaseException, line: str = "where", name: str = "") -> ErrorReport:
    """Report an error as a replica does; under another `name`, it cannot be pickled."""
    return ErrorReport(
        pickled=None if name else pickle.dumps(error),
        type_name=name or type(error).__name__,
        text=str(error),
        traceback=(line,),
        rendered=(line,),
    )


def raised_for(*reports: ErrorReport) -> Any:
    """Return the exception for the replicas' errors, in order of arrival. Replicas without one have finished."""
    outcome = Outcome(1, (0, 1))
    for engine in range(2):
        error = reports[engine] if engine < len(reports) else None
        outcome.receive(engine, Reply(program=1, status="error" if error else "ok", error=error))
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        raise_failure(outcome, TEAM)
    return raised.value


def shown(error: Any) -> str:
    return "\n".join(error._render_traceback_())


def test_a_class_that_cannot_be_loaded_is_reported_with_the_reason() -> None:
    mine = report(ValueError("text"), name="no_such_module.Mine")
    error = raised_for(dataclasses.replace(mine, pickled=b"cno_such_module\nMine\n."))
    assert isinstance(error, RemoteError)
    assert str(error) == "no_such_module.Mine: text"
    for text in (shown(error), "\n".join(error.__notes__)):
        assert "ModuleNotFoundError: No module named 'no_such_module'" in text
        assert "replica 1 finished" in text


@pytest.mark.parametrize(
    ("raised", "note"),
    [
        (KeyError("k"), "(replica 1 finished)"),
        (SystemExit(3), "(replica 0 of 2 (cpu:0) ended by it; replica 1 finished)"),
    ],
)
def test_an_exception_keeps_its_type_and_notes_the_others(raised: BaseException, note: str) -> None:
    error = raised_for(report(raised))
    assert (type(error), error.args, error.__notes__) == (type(raised), raised.args, [note])


def test_two_replicas_that_raise_different_errors_are_both_shown() -> None:
    first = report(KeyError("k"), "line 1")
    text = shown(raised_for(first, report(ValueError("v"), "line 2")))
    assert text.index("Replica 0 of 2 (cpu:0) raised:\nline 1") < text.index("Replica 1 of 2 (cpu:0) raised:\nline 2")
    lost = report(CollectiveError("lost"), "line 2", "distnb.errors.CollectiveError")
    assert "line 2" not in shown(raised_for(first, lost))


def test_replicas_that_ended_at_different_steps_are_reported() -> None:
    earlier, later, other = ("Linear 1", (1, 1)), ("Linear 1", (2, 1)), ("Net 2", (2, 2))
    text = step_difference({0: {earlier: 8, other: 4}, 1: {earlier: 6, other: 4}})
    assert "Linear 1 (8 on replica 0, 6 on replica 1)" in text
    assert "Net 2" not in text
    assert not step_difference({0: {earlier: 8, later: 2}, 1: {later: 2, earlier: 8}})


def test_a_warning_of_drift_names_the_cell() -> None:
    outcome = Outcome(1, (0, 1))
    for engine in range(2):
        outcome.receive(engine, Reply(program=1, status="ok", changed={"parameter 0 of Linear 1 [2]": engine}))
    with pytest.warns(UserWarning, match="differ between replicas since this cell: parameter 0 of Linear 1") as found:
        warn_of_drift(outcome, "Cell In[3]")
    assert found[0].filename == "Cell In[3]"


def test_a_replica_that_does_not_end_is_reported_with_the_cure() -> None:
    outcome = Outcome(1, (0, 1))
    outcome.interrupted = True
    outcome.receive(0, Reply(program=1, status="interrupted"))
    outcome.mark_lost(1, None)
    with pytest.raises(KeyboardInterrupt, match=r"replica 1 still busy.*replace it with %distnb restart 1"):
        raise_failure(outcome, TEAM)


@pytest.mark.parametrize(("error", "raised"), [(CollectiveError("lost"), EngineDied), (KeyError("k"), KeyError)])
def test_a_collective_that_ends_because_a_process_died_is_not_the_reason(error: Exception, raised: type) -> None:
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    outcome = Outcome(1, (0, 1))
    found = dataclasses.replace(report(error), type_name=name)
    outcome.receive(0, Reply(program=1, status="error", error=found))
    outcome.mark_lost(1, "was killed by SIGKILL")
    with pytest.raises(raised):
        raise_failure(outcome, TEAM)


def test_a_late_successful_end_is_not_a_failure() -> None:
    outcome = Outcome(1, (0, 1))
    outcome.receive(0, Reply(program=1, status="ok"))
    outcome.mark_lost(1, None)
    outcome.receive(1, Reply(program=1, status="ok"))
    assert outcome.ok
    assert not outcome.left_group_whole
    raise_failure(outcome, TEAM)


def test_the_call_in_an_ordinary_cell_is_shown_above() -> None:
    outcome = Outcome(1, (0,))
    error = dataclasses.replace(report(KeyError("k")), rendered=("there",))
    outcome.receive(0, Reply(program=1, status="error", error=error))
    for called in (True, False):
        with pytest.raises(KeyError) as raised:
            raise_failure(
                outcome,
                Team(engines=(0,), devices=(Device("cpu"),), generation=1, store_host="", store_port=0),
                callers_lines=(lambda error: ["here"]) if called else None,
            )
        lines = raised.value._render_traceback_()  # type: ignore[attr-defined]
        assert lines[:-1] == ["here"] * called + ["Replica 0 of 1 (cpu:0) raised:", "there"]
        assert lines[-1].startswith("(%debug opens a debugger there")


@pytest.mark.parametrize("name", ["CollectiveError", "CollectiveMismatchError"])
def test_a_consequence_reported_first_does_not_hide_the_error_that_caused_it(name: str) -> None:
    consequence = report(CollectiveError("waits for ever"), name=f"distnb.errors.{name}")
    error = raised_for(consequence, report(ValueError("mine")))
    assert (type(error), str(error)) == (ValueError, "mine")
