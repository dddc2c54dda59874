"""The state machine that decides when a program must end."""

from __future__ import annotations

from distnb.notebook.programs.supervision import EndProgram, GiveUpOn, Supervision


def test_a_program_that_goes_well_orders_nothing() -> None:
    state = Supervision()
    state.began(1, [0, 1], 0.0)
    assert state.ended(0, 1, True, "", 0.0) == []
    assert state.waiting_for(1) == {1}
    assert state.ended(1, 1, True, "", 0.1) == []
    assert state.waiting_for(1) == frozenset()
    assert state.next_deadline() is None


def test_one_failure_ends_the_program_on_the_others_once() -> None:
    state = Supervision()
    state.began(1, [0, 1, 2, 3], 0.0)
    orders = state.ended(2, 1, False, "ValueError: no", 5.0)
    assert [(order.engine, order.interrupted) for order in orders if isinstance(order, EndProgram)] == [
        (0, False), (1, False), (3, False),
    ]  # fmt: skip
    assert all("ValueError: no" in order.reason for order in orders if isinstance(order, EndProgram))
    assert state.ended(0, 1, False, "aborted", 5.1) == []


def test_a_replica_that_does_not_end_in_time_is_marked_stuck() -> None:
    state = Supervision()
    state.began(7, [0, 1], 0.0)
    state.ended(0, 7, False, "boom", 10.0)
    assert state.next_deadline() == 11.0
    assert state.tick(10.9) == []
    assert state.tick(11.0) == [GiveUpOn(1, 7)]
    assert state.stuck == {1: 7}
    state.ended(1, 7, False, "late", 60.0)
    assert state.stuck == {}


def test_a_death_ends_every_program_of_the_engine() -> None:
    state = Supervision()
    state.began(1, [0, 1], 0.0)
    state.began(2, [0, 1], 0.0)
    orders = state.died(1, 0.0)
    assert [(order.engine, order.program) for order in orders] == [(0, 1), (0, 2)]
    assert state.waiting_for(1) == {0}


def test_a_program_on_engines_that_are_lost_to_another_notebook_is_not_ended() -> None:
    state = Supervision()
    state.began(1, [0, 1], 0.0)
    assert state.lost(0.0) == []
    assert not state.follows(1)


def test_an_interrupt_ends_the_program_on_all_engines() -> None:
    state = Supervision()
    state.began(3, [0, 1], 0.0)
    orders = state.interrupted(3, 0.0)
    assert {order.engine for order in orders} == {0, 1}
    assert all(isinstance(order, EndProgram) and order.interrupted for order in orders)
    assert state.interrupted(3, 0.1) == [], "a double click is one press"
    assert state.next_deadline() == 1.0


def test_handlers_have_time_after_an_interrupt_until_the_next_one() -> None:
    state = Supervision()
    state.began(3, [0, 1], 0.0)
    state.began(4, [0, 1], 0.0)  # the engines begin it afterwards
    state.interrupted(4, 0.0)
    state.interrupted(3, 0.0)
    state.cleans_up(0, 3, 0.3)
    assert state.tick(1.0) == [GiveUpOn(1, 3), GiveUpOn(1, 4)]
    assert state.next_deadline() == 31.3
    state.ended(1, 3, False, "", 1.5)
    assert [order.engine for order in state.interrupted(3, 5.0)] == [0]
    assert state.next_deadline() == 6.0
    assert state.tick(6.0) == [GiveUpOn(0, 3)]


def test_handlers_have_no_time_after_a_failure() -> None:
    state = Supervision()
    state.began(3, [0, 1], 0.0)
    state.cleans_up(1, 3, 0.5)
    state.ended(0, 3, False, "boom", 1.0)
    assert state.next_deadline() == 2.0


def test_events_of_ended_programs_change_nothing() -> None:
    state = Supervision()
    assert state.ended(0, 99, False, "late", 0.0) == []
    assert state.interrupted(99, 0.0) == []
    assert state.died(0, 0.0) == []


def test_the_story_names_the_oldest_programs_and_counts_the_others():
    state = Supervision()
    for program in range(20):
        state.began(program, (0,), now=float(program))
    state.ended(0, 15, True, "", now=20.0)
    assert (state.story[-1].event, state.story[-1].details) == ("ended", (0, 15, True, ""))
    assert "program 7 on 0; 12 more programs" in state.story[-1].before
    assert "11 more programs" in state.story[-1].after
    state.tick(now=21.0)
    assert state.story[-1].event == "ended", "a tick without orders is left out"
