"""The state machine of a communicator's failure."""

from __future__ import annotations

import pytest

from distnb.collectives.group.communicator_state import CommunicatorState
from distnb.errors import CollectiveError, ProgramAborted

FAILED, LATER = CollectiveError("replica 1 called something else"), CollectiveError("later")
ABORTED = ProgramAborted("replica 1 failed")


@pytest.mark.parametrize(
    ("events", "phase", "failure"),
    [
        ((), "open", None),
        ((("fail", FAILED, "", False), ("fail", LATER, "", True)), "failed", FAILED),
        ((("fail", FAILED, "", True), ("stop", LATER)), "handed over", FAILED),
        ((("fail", FAILED, "", False), ("hand_over",)), "handed over", FAILED),
        ((("fail", ABORTED, "", False), ("hand_over",)), "stopped", ABORTED),
        ((("stop", FAILED), ("fail", LATER, "", False)), "stopped", FAILED),
        ((("fail", FAILED, "", True), ("retire", LATER), ("hand_over",)), "retired", LATER),
    ],
)
def test_the_first_error_counts(events, phase, failure):
    state = CommunicatorState()
    for name, *arguments in events:
        getattr(state, name)(*arguments, now=1.0)
    assert (state.phase, state.failure) == (phase, failure)


def test_only_an_error_of_the_program_is_reported_and_once():
    state = CommunicatorState()
    assert state.fail(FAILED, "", False, now=1.0) == ("report", "free", "fail parent")
    assert state.fail(FAILED, "", False, now=1.0) == ()
    assert CommunicatorState().fail(ABORTED, "", False, now=1.0) == ("free",)


def test_a_failure_becomes_an_earlier_program_s():
    state = CommunicatorState()
    state.begin_program(now=1.0)
    state.fail(FAILED, "", False, now=2.0)
    assert not state.is_earlier
    state.begin_program(now=3.0)
    assert (state.is_earlier, state.phase) == (True, "failed")
