"""Ctrl-C during a program: at any moment, never lost, and without lasting effects."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import distnb
from distnb.collectives.gradients.backward_passes import BackwardPasses
from distnb.collectives.gradients.gradient_sync import GradientSync
from distnb.compat import torch_internals
from distnb.runtime import contexts
from distnb.runtime.interrupts import Interrupts
from distnb.runtime.randomness import Streams
from distnb.runtime.scopes.made_objects import MadeObjects
from tests.support.interruptions import interrupted_everywhere


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
                taken += interrupts.pop()
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
            assert interrupts.pop()
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
        assert interrupts.pop()


class Listener:
    """A listener of backward passes that counts them."""

    aggregates = True

    def __init__(self) -> None:
        self.began = self.ended = 0

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        self.began += 1

    def end(self) -> None:
        self.ended += 1

    def failed(self) -> None: ...


# Python drops an interrupt that arrives as a generator is freed.
destructors_may_be_interrupted = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@destructors_may_be_interrupted
def test_a_backward_pass_that_was_interrupted_does_not_last() -> None:
    passes, listener, weight = BackwardPasses(), Listener(), torch.ones(2, requires_grad=True)
    plain = torch_internals.backward_function()
    passes.listen(listener)
    try:
        for place in interrupted_everywhere(lambda: weight.sum().backward()):
            listener.began = listener.ended = 0
            weight.sum().backward()
            assert (listener.began, listener.ended) == (1, 1), place
        assert place > 5
    finally:
        passes.stop_listening(listener)
    assert torch_internals.backward_function() == plain
    assert not passes.nesting_seen


def use_sync(sync: GradientSync) -> None:
    with sync.no_sync():
        assert not sync.is_synced


def use_strategies() -> None:
    for strategy in (distnb.get_strategy(), distnb.OneDeviceStrategy("cpu:0")):
        with strategy.scope():
            assert strategy.run(lambda value: value, args=(1,)) == 1


def use_execution() -> None:
    with contexts.executing(contexts.Execution(None, "single")):
        assert contexts.execution() is not None


@destructors_may_be_interrupted
def test_no_context_outlasts_an_interrupt() -> None:
    sync: Any = GradientSync(lambda: None)  # type: ignore[arg-type, return-value]
    for place in interrupted_everywhere(lambda: use_sync(sync)):
        assert sync.is_synced, place
    for place in interrupted_everywhere(use_strategies):
        assert not distnb.has_strategy(), place
        assert distnb.in_cross_replica_context() is False, place
        use_strategies()
    for place in interrupted_everywhere(use_execution):
        assert contexts.execution() is None, place


def test_parameters_are_noted_only_in_scopes_whatever_was_interrupted() -> None:
    made = MadeObjects("strategy", lambda module: None, lambda *_: None)
    plain = torch.nn.Module.__init__

    def scope() -> None:
        with contexts.enter_cross_replica("strategy"), made.noting():
            torch.nn.Parameter(torch.ones(1))

    for place in interrupted_everywhere(scope):
        made.forget()
        torch.nn.Parameter(torch.ones(1))
        assert not made.pending, place
        scope()
        assert made.pending, place
        assert torch.nn.Module.__init__ is plain, place


def test_random_streams_are_left_whatever_was_interrupted() -> None:
    streams = Streams()

    def draw() -> None:
        with contexts.enter_cross_replica("strategy"):
            depth = streams.depth
            try:
                streams.enter(1)
                with streams.shared():
                    torch.rand(1)
            finally:
                streams.leave(depth)

    torch.manual_seed(1)
    wanted = torch.rand(2)
    for place in interrupted_everywhere(draw):
        torch.manual_seed(1)
        draw()
        torch.manual_seed(1)
        assert torch.equal(torch.rand(2), wanted), place
