"""The stories of the state machines, and their invariants."""

from __future__ import annotations

import logging
from unittest import TestCase

import pytest

from distnb.errors import InvariantError
from distnb.notebook.programs.supervision import EndProgram, GiveUpOn, Supervision


def test_the_supervision_records_each_transition() -> None:
    state = Supervision()
    state.began(7, (0, 1), 1.0)
    state.ended(1, 7, False, "ValueError: no", 2.0)
    state.tick(2.5)
    state.tick(3.0)
    state.ended(0, 7, False, "late", 9.0)
    began, failed, given_up, reported = state.story
    assert (began.time, began.event, began.details) == (1.0, "began", (7, (0, 1)))
    assert (began.before, began.after, began.orders) == ("[idle]", "[program 7 on 0, 1]", ())
    assert failed.after == "[program 7 on 0]"
    assert failed.orders == (EndProgram(0, 7, "replica on engine 1 failed: ValueError: no", False),)
    assert (given_up.event, given_up.after, given_up.orders) == ("tick", "[engine 0 stuck in 7]", (GiveUpOn(0, 7),))
    assert (reported.time, reported.after) == (9.0, "[idle]")


def test_a_story_keeps_the_latest_transitions() -> None:
    state = Supervision()
    for program in range(1000):
        state.began(program, (0,), float(program))
        state.ended(0, program, True, "", float(program))
    assert len(state.story) == 256
    assert state.story[-1].details == (0, 999, True, "")


def test_each_transition_is_logged() -> None:
    state = Supervision()
    with TestCase().assertLogs("distnb", logging.DEBUG) as logged:
        state.began(1, (0,), 5.0)
        state.tick(5.0)
    assert [record.getMessage() for record in logged.records] == ["5.000 began(1, (0,)): [idle] -> [program 1 on 0]"]


def test_a_violation_of_the_supervision_is_reported_with_the_story() -> None:
    state = Supervision()
    state.began(1, (0, 1), 0.0)
    state._programs[1].waiting.add(5)
    with pytest.raises(InvariantError, match=r"waits for \[5\], to which it was not sent(?s:.*)began\(1, \(0, 1\)\)"):
        state.ended(0, 1, True, "", 0.1)


def test_a_dead_engine_is_not_waited_for() -> None:
    state = Supervision()
    state.began(1, (0, 1), 0.0)
    state.died(1, 0.1)
    state._programs[1].waiting.add(1)
    with pytest.raises(InvariantError, match=r"waits for \[1\], which died"):
        state.interrupted(1, 0.2)


def test_a_program_may_be_sent_to_an_engine_that_just_died() -> None:
    state = Supervision()
    state.died(1, 0.0)
    state.began(1, (0, 1), 0.1)
    orders = state.ended(1, 1, False, "was killed by SIGKILL", 0.2)
    assert [(order.engine, order.program) for order in orders] == [(0, 1)]
    state.joined(1, 1.0)


def test_invariants_are_checked_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTNB_VALIDATE")
    state = Supervision()
    state.began(1, (0,), 0.0)
    state._programs[1].waiting.add(5)
    state.ended(0, 1, True, "", 0.1)
