"""Counters of this process's work, in plain integers: counting costs next to nothing, and any thread may read them.

A *training step* is a call of `strategy.run` in which an optimizer stepped, however often it did. Evaluation is none.
Outside `run`, in code that was written for torchrun say, each step of an optimizer is one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection
from types import TracebackType
from typing import Any, NamedTuple

from distnb import activity
from distnb.input.progress import Progress

__all__ = [
    "Axis",
    "Reading",
    "StepPosition",
    "calling",
    "epochs_begun",
    "examples",
    "note_step",
    "place",
    "reading",
    "stepped",
    "steps",
    "watch_optimizers",
]

steps = 0
"""Training steps that ended well."""

examples = 0
"""Examples in this replica's slices of the batches given to `run`."""

StepPosition = tuple[int, int]
"""The training step of a live value, and the number of the call of `run` that reports it, 0 outside."""


class Reading(NamedTuple):
    """The position in the data that is trained on; see `distnb.input.progress.Progress`."""

    epoch: int
    batch: int
    batches: int | None
    epochs: int | None


_epochs: deque[tuple[int, int]] = deque(maxlen=4096)
_pass: Progress | None = None  # the iteration whose batches are trained on
_call = _calls = 0
_stepped = _watching = False


class _Calling:
    """A context in which a function runs that `strategy.run` called."""

    def __enter__(self) -> None:
        global _call, _calls, _stepped
        if not _watching:
            watch_optimizers()
        _calls += 1
        _call, _stepped = _calls, False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _call, _stepped
        _call = 0
        if _stepped and kind is None:
            stepped()
        _stepped = False


calling = _Calling()


def place() -> StepPosition:
    """Return the position of a live value: in a function that `run` calls, the step under way."""
    return (steps + 1, _call) if _call else (steps, 0)


def stepped(count: int = 1) -> None:
    """So many training steps ended well: here, or on the replicas that this process called."""
    global steps, _pass
    if not count:
        return
    if Progress.latest is not _pass and Progress.latest is not None:
        _pass = Progress.latest
        _epochs.append((steps, _pass.epoch))
    steps += count
    activity.note_step(steps)


def epochs_begun() -> tuple[tuple[int, int], ...]:
    """Return (steps before it, number) of each iteration over data that training began since the last call."""
    return tuple(_epochs.popleft() for _ in range(len(_epochs)))


def reading() -> Reading | None:
    """Return the position of the latest iteration whose batches were trained on; None where there was none."""
    here = _pass
    return (
        None if here is None else Reading(epoch=here.epoch, batch=here.steps, batches=here.batches, epochs=here.epochs)
    )


class Axis:
    """The positions of a replica's values on an axis of training steps: all values of a step share one place.

    A program that does not train, or not yet, has no steps: there a name that is reported again begins the next place.
    """

    def __init__(self) -> None:
        self._step = self._call = self._repeats = 0
        self._told: set[str] = set()

    def put(self, place: StepPosition, names: Collection[str]) -> int:
        """Return the place of values of these names that were reported at a position; it never goes back."""
        step, call = place
        if step > self._step:
            self._step, self._told = step, set()
        elif self._step <= 1 and not (call and call == self._call) and not self._told.isdisjoint(names):
            self._repeats += 1
            self._told = set()
        self._call = call
        self._told.update(names)
        return self._step + self._repeats


def watch_optimizers() -> None:
    """Count steps from now on, if torch is there: without it, none is taken."""
    global _watching
    if _watching or "torch" not in sys.modules:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from distnb.collectives.group.eager import always_eager

    _watching = True
    register_optimizer_step_post_hook(always_eager(_after_step))


def note_step(own_examples: int) -> None:
    """Count a step, of so many examples, by other means than torch's optimizers in a function that `run` calls."""
    global _stepped, examples
    _stepped = True
    examples += own_examples


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global _stepped
    if _call:
        _stepped = True
    else:
        stepped()
