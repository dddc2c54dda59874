"""Counters of this process's work: plain integers, which cost almost nothing and which any thread may read.

A *training step* is a call of `strategy.run` in which an optimizer stepped at least once. A call without an optimizer
step, such as an evaluation, is not counted. Outside `run`, as in code written for torchrun, each optimizer step counts.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection
from types import TracebackType
from typing import Any, NamedTuple

from distnb import activity
from distnb.frames import spared
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
"""The number of training steps that ended without an error."""

examples = 0
"""The number of examples in this replica's slices of the batches given to `run`."""

StepPosition = tuple[int, int]
"""The training step of a live value, and the number of the call of `run` that reported it (0 outside `run`)."""


class Reading(NamedTuple):
    """The position in the training data; see `distnb.input.progress.Progress`."""

    epoch: int
    batch: int
    batches: int | None
    epochs: int | None


_epochs: deque[tuple[int, int]] = deque(maxlen=4096)
_pass: Progress | None = None  # the iteration over the training data
_call = _calls = 0
_stepped = _watching = False


class _Calling:
    """The context of a function that `strategy.run` calls."""

    def __enter__(self) -> None:
        global _call, _calls, _stepped
        if not _watching:
            watch_optimizers()
        _calls += 1
        _call, _stepped = _calls, False

    @spared
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
    """Return the position of a live value reported now. In a function that `run` calls this is the current step."""
    return (steps + 1, _call) if _call else (steps, 0)


def stepped(count: int = 1) -> None:
    """Count training steps that ended without an error, here or on replicas that this process called."""
    global steps, _pass
    if not count:
        return
    if Progress.latest is not _pass and Progress.latest is not None:
        _pass = Progress.latest
        _epochs.append((steps, _pass.epoch))
    steps += count
    activity.note_step(steps)


def epochs_begun() -> tuple[tuple[int, int], ...]:
    """Return (steps before it, number of the epoch) for each iteration that training has begun since the last call."""
    return tuple(_epochs.popleft() for _ in range(len(_epochs)))


def reading() -> Reading | None:
    """Return the position of the latest iteration over training data, or None if there was none."""
    here = _pass
    return (
        None if here is None else Reading(epoch=here.epoch, batch=here.steps, batches=here.batches, epochs=here.epochs)
    )


class Axis:
    """The positions of a replica's live values on an axis of training steps. All values of a step share one place.

    A program that has not trained yet has no steps. A name that is reported again then begins the next place.
    """

    def __init__(self) -> None:
        self._step = self._call = self._repeats = 0
        self._names: set[str] = set()

    def put(self, place: StepPosition, names: Collection[str]) -> int:
        """Return the place of values with these names that were reported at a position. Places never decrease."""
        step, call = place
        if step > self._step:
            self._step, self._names = step, set()
        elif self._step <= 1 and not (call and call == self._call) and not self._names.isdisjoint(names):
            self._repeats += 1
            self._names = set()
        self._call = call
        self._names.update(names)
        return self._step + self._repeats


def watch_optimizers() -> None:
    """Count steps from now on, if torch is loaded. Without torch there are none."""
    global _watching
    if _watching or "torch" not in sys.modules:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from distnb.collectives.eager import always_eager

    _watching = True
    register_optimizer_step_post_hook(always_eager(_after_step))


def note_step(own_examples: int) -> None:
    """Count a step without a torch optimizer in the current call of `run`, and this replica's examples in it."""
    global _stepped, examples
    _stepped = True
    examples += own_examples


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global _stepped
    if _call:
        _stepped = True
    else:
        stepped()
