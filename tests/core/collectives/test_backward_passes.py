"""Detection of backward passes, and an unchanged autograd."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES


class Listener:
    aggregates = True

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.fails_at = ""

    def _note(self, what: str) -> None:
        self.noted.append(what)
        if what == self.fails_at:
            raise ValueError(what)

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        self._note("begin graph" if create_graph else "begin")

    def end(self) -> None:
        self._note("end")

    def failed(self) -> None:
        self._note("failed")

    def computing(self, inputs: Sequence[Any], create_graph: bool) -> AbstractContextManager[Any]:
        return nullcontext()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    BACKWARD_PASSES.listen(made)
    yield made
    BACKWARD_PASSES.stop_listening(made)


def weight() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_autograd_is_left_as_it_was_found() -> None:
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    listener = Listener()
    BACKWARD_PASSES.listen(listener)
    assert torch.autograd._engine_run_backward is not before  # type: ignore[attr-defined]
    BACKWARD_PASSES.stop_listening(listener)
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]
    weight().sum().backward()
    assert listener.noted == []


def test_every_way_to_begin_a_pass_is_noticed(listener: Listener) -> None:
    weight().sum().backward()
    torch.autograd.backward([weight().sum()])
    with pytest.warns(UserWarning, match="create_graph"):
        weight().sum().backward(create_graph=True)
    assert listener.noted == ["begin", "end"] * 2 + ["begin graph", "end"]


def test_autograd_grad_is_no_backward_pass(listener: Listener) -> None:
    w = weight()
    torch.autograd.grad(w.square().sum(), w)
    assert listener.noted == []


def test_a_nested_pass_belongs_to_the_outer_one(listener: Listener) -> None:
    w = weight()
    checkpoint(lambda t: t * w, w * 2, use_reentrant=True).sum().backward()
    assert listener.noted == ["begin", "end"]
    assert BACKWARD_PASSES.nesting_seen


def test_a_failing_pass_is_reported_as_failed(listener: Listener) -> None:
    w = weight() * 1
    w.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        w.sum().backward()
    assert listener.noted == ["begin", "failed"]


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_failing_listener_ends_its_pass_only(listener: Listener, where: str) -> None:
    listener.fails_at = where
    with pytest.raises(ValueError, match=where):
        weight().sum().backward()
    assert listener.noted[-1] == "failed"
    listener.fails_at = ""
    weight().sum().backward()
    assert listener.noted[-2:] == ["begin", "end"]


def test_passes_of_two_threads_end_together(listener: Listener) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        w = weight() * 1
        w.register_hook(lambda g: (inside.set(), go_on.wait())[0])
        w.sum().backward()

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()
    inside.wait()
    weight().sum().backward()
    assert listener.noted == ["begin"]
    go_on.set()
    thread.join()
    assert listener.noted == ["begin", "end"]
