"""The notebook's exception for a replica's exception."""

from __future__ import annotations

import pickle

import pytest

from distnb.errors import CollectiveError, EngineDied, RemoteError
from distnb.notebook.programs.failures import raise_failure, step_difference
from distnb.notebook.programs.outcome import Outcome
from distnb.topology import Device, Team
from distnb.wire.messages import ErrorReport, Reply

TEAM = Team(engines=(0, 1), devices=(Device("cpu"),) * 2, generation=1, store_host="", store_port=0)


def raised_for(report: ErrorReport) -> BaseException:
    outcome = Outcome(1, (0, 1))
    outcome.receive(0, Reply(program=1, status="error", error=report))
    outcome.receive(1, Reply(program=1, status="ok"))
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        raise_failure(outcome, TEAM)
    return raised.value


def test_a_class_that_cannot_be_loaded_is_reported_with_the_reason() -> None:
    report = ErrorReport(
        pickled=b"cno_such_module\nMine\n.",
        type_name="no_such_module.Mine",
        text="text",
        traceback=("where",),
        rendered=("where",),
    )
    error = raised_for(report)
    assert isinstance(error, RemoteError)
    assert str(error) == "no_such_module.Mine: text"
    shown = "\n".join(error._render_traceback_())  # type: ignore[attr-defined]
    for text in (shown, "\n".join(error.__notes__)):
        assert "ModuleNotFoundError: No module named 'no_such_module'" in text
        assert "replica 1 finished" in text


def test_an_exception_keeps_its_type() -> None:
    error = raised_for(
        ErrorReport(
            pickled=pickle.dumps(KeyError("k")),
            type_name="KeyError",
            text="'k'",
            traceback=("where",),
            rendered=("where",),
        )
    )
    assert type(error) is KeyError
    assert error.__notes__ == ["(replica 1 finished)"]


def test_a_replica_that_ended_by_sys_exit_is_named() -> None:
    error = raised_for(
        ErrorReport(
            pickled=pickle.dumps(SystemExit(3)),
            type_name="SystemExit",
            text="3",
            traceback=("where",),
            rendered=("where",),
        )
    )
    assert type(error) is SystemExit
    assert error.code == 3
    assert error.__notes__ == ["(replica 0 of 2 (cpu:0) ended by it; replica 1 finished)"]


def test_two_replicas_that_raise_different_errors_are_both_shown() -> None:
    def shown(second: ErrorReport) -> str:
        outcome = Outcome(1, (0, 1))
        first = ErrorReport(
            pickled=pickle.dumps(KeyError("k")),
            type_name="KeyError",
            text="'k'",
            traceback=("line 1",),
            rendered=("line 1",),
        )
        outcome.receive(0, Reply(program=1, status="error", error=first))
        outcome.receive(1, Reply(program=1, status="error", error=second))
        with pytest.raises(KeyError) as raised:
            raise_failure(outcome, TEAM)
        return "\n".join(raised.value._render_traceback_())  # type: ignore[attr-defined]

    text = shown(
        ErrorReport(
            pickled=pickle.dumps(ValueError("v")),
            type_name="ValueError",
            text="v",
            traceback=("line 2",),
            rendered=("line 2",),
        )
    )
    assert text.index("Replica 0 of 2 (cpu:0) raised:\nline 1") < text.index("Replica 1 of 2 (cpu:0) raised:\nline 2")
    assert "line 2" not in shown(
        ErrorReport(
            pickled=None,
            type_name="distnb.errors.CollectiveError",
            text="lost",
            traceback=("line 2",),
            rendered=("line 2",),
        )
    )


def test_replicas_that_ended_at_different_steps_are_reported() -> None:
    text = step_difference({0: {"Linear 1": 8, "Net 2": 4}, 1: {"Linear 1": 6, "Net 2": 4}})
    assert "Linear 1 (8 on replica 0, 6 on replica 1)" in text
    assert "Net 2" not in text
    assert not step_difference({0: {"Linear 1": 8}, 1: {"Linear 1": 8}})


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
    outcome.receive(
        0,
        Reply(
            program=1,
            status="error",
            error=ErrorReport(pickled=pickle.dumps(error), type_name=name, text=str(error), traceback=(), rendered=()),
        ),
    )
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
    report = ErrorReport(
        pickled=pickle.dumps(KeyError("k")), type_name="KeyError", text="'k'", traceback=("where",), rendered=("there",)
    )
    outcome.receive(0, Reply(program=1, status="error", error=report))
    for called in (True, False):
        with pytest.raises(KeyError) as raised:
            raise_failure(
                outcome,
                Team(engines=(0,), devices=(Device("cpu"),), generation=1, store_host="", store_port=0),
                callers_lines=(lambda error: ["here"]) if called else None,
            )
        shown = raised.value._render_traceback_()  # type: ignore[attr-defined]
        assert shown[:-1] == ["here"] * called + ["Replica 0 of 1 (cpu:0) raised:", "there"]
        assert shown[-1].startswith("(%debug opens a debugger there")


@pytest.mark.parametrize("name", ["CollectiveError", "CollectiveMismatchError"])
def test_a_consequence_reported_first_does_not_hide_the_error_that_caused_it(name: str) -> None:
    outcome = Outcome(1, (0, 1))
    outcome.receive(
        0,
        Reply(
            program=1,
            status="error",
            error=ErrorReport(
                pickled=None,
                type_name=f"distnb.errors.{name}",
                text="waits for ever",
                traceback=("1",),
                rendered=("1",),
            ),
        ),
    )
    cause = ErrorReport(
        pickled=pickle.dumps(ValueError("mine")), type_name="ValueError", text="mine", traceback=("2",), rendered=("2",)
    )
    outcome.receive(1, Reply(program=1, status="error", error=cause))
    with pytest.raises(ValueError, match="mine"):
        raise_failure(outcome, TEAM)
