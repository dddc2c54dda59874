"""Ctrl-C in the notebook during a program: at any moment, and never lost."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from distnb.runtime.interrupts import Interrupts


@pytest.fixture(autouse=True)
def pythons_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    yield interrupts
    interrupts.close()


def pressing(code: Any, moment: int) -> tuple[Callable[[FrameType, str, Any], Any], list[int]]:
    """Return a trace function that presses Ctrl-C before one instruction of a function, and whether it did."""
    count, pressed = 0, []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == moment:
                pressed.append(moment)
                signal.raise_signal(signal.SIGINT)
        return trace

    return trace, pressed


@pytest.mark.parametrize("function", [Interrupts.__enter__, Interrupts.__exit__], ids=["begins", "ends"])
@pytest.mark.parametrize("lasting", [False, True])
def test_an_interrupt_at_the_boundary_of_a_hold_is_not_lost(
    interrupts: Interrupts, function: Any, lasting: bool
) -> None:
    for moment in range(1, 1000):
        trace, pressed = pressing(function.__code__, moment)
        before, raised, taken = sys.gettrace(), 0, 0
        sys._getframe().f_trace_opcodes = True  # Python 3.12 reports opcodes only if one frame asks before settrace
        try:
            sys.settrace(trace)
            with interrupts:
                taken += interrupts.take()
                if lasting:  # so the next one raises, in what follows
                    interrupts.brief().__enter__()
                    signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raised = 1
        finally:
            sys.settrace(before)
        assert raised if lasting else raised + taken == len(pressed), moment
        # Afterwards interrupts work as before.
        with interrupts:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert interrupts.take()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if not pressed:
            break
    assert 10 < moment < 999


def test_a_held_interrupt_is_raised_at_the_end_and_only_there(interrupts: Interrupts) -> None:
    steps = []

    def program() -> None:
        with interrupts:
            with interrupts:
                signal.raise_signal(signal.SIGINT)
                steps.append("within")
            steps.append("still within")

    with pytest.raises(KeyboardInterrupt):
        program()
    with interrupts:
        steps.append("next")
    assert steps == ["within", "still within", "next"]


def test_a_held_interrupt_does_not_hide_an_error(interrupts: Interrupts) -> None:
    def program() -> None:
        with interrupts:
            signal.raise_signal(signal.SIGINT)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        program()


def test_a_second_interrupt_ends_a_long_hold(interrupts: Interrupts) -> None:
    steps = []

    def program() -> None:
        with interrupts, interrupts.brief():
            signal.raise_signal(signal.SIGINT)
            steps.append("packing")
            signal.raise_signal(signal.SIGINT)
            steps.append("packed")

    with pytest.raises(KeyboardInterrupt):
        program()
    assert steps == ["packing"]
    with interrupts:
        with interrupts.brief():
            pass
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.take()
