"""`distnb.live`: values to watch while the program runs. This module draws nothing.

An engine sends the values to the notebook. In the notebook they go to the running cell's view. In a plain script,
replica 0 prints a line with the latest values from time to time.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from distnb.errors import OptionError
from distnb.runtime import step_count
from distnb.runtime.this_process import this_process
from distnb.values import DistributedValues

__all__ = ["Point", "TextProgress", "is_ready", "live"]

Point = dict[str, Any]
"""The values of one call: {name: number} or {name: {replica: number}}, with any number that `float` accepts."""


def live(*values: Any, run: Any = "", **scalars: Any) -> None:
    """Show values while the program runs. Each name gets a curve that grows.

    Call it where the values are computed: in the function that `strategy.run` calls, at the top level of a distributed
    cell, in ordinary cells, in a script. It never waits for an accelerator: a tensor's value is read later.

    Args:
        run: The name of the run that the values belong to, such as "lr=0.1". If a cell names its runs, its charts
            also show the named runs of earlier cells, for comparison. A run begins at step 0 in each cell.
        **scalars: Numbers, tensors of one element, or distributed values of them (a replica shows its own component,
            the notebook shows all components).

    Raises:
        OptionError: A value is not a scalar or has no name, or `run` is not a string.

    Example:
        >>> import distnb
        >>> distnb.live(loss=0.25, accuracy=0.9)        # doctest: +SKIP
    """
    if values:
        raise OptionError(
            f"live got a {type(values[0]).__name__} without a name. Write distnb.live(loss=value): each name gets a "
            "curve of its own."
        )
    if not isinstance(run, str):
        raise OptionError(
            f'live(run={repr(run)[:80]}): `run` is the name of a run, a string such as "lr=0.1". To draw '
            "a value, choose another name."
        )
    point = {name: _scalar(name, value) for name, value in scalars.items()}
    if point:
        (this_process.live_sink or _terminal)(point, step_count.place(), run)


def is_ready(point: Mapping[str, Any]) -> bool:
    """Return whether every number of a point can be read without waiting for a device."""
    return all(value.ready for value in point.values() if isinstance(value, _OnDevice))


class _OnDevice:
    """A number that is being copied from an accelerator to host memory. The copy is queued behind the computation."""

    def __init__(self, tensor: Any) -> None:
        import torch

        # Copy now: the tensor may be changed in place before the number is read.
        self._copy = tensor.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    @property
    def ready(self) -> bool:
        return bool(self._arrived.query())

    def __float__(self) -> float:
        self._arrived.synchronize()
        return float(self._copy)


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, float | int):
        return float(value)
    if isinstance(value, DistributedValues):
        components = {replica: _scalar(name, value.component(replica)) for replica in value.replica_ids}
        # A replica has only its own component, and the event that carries it names the replica.
        return next(iter(components.values())) if len(components) == 1 else components
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # After a training step, torch's code is in no CPU cache, so each call of a torch function takes a microsecond.
        if value.is_cuda and value.numel() == 1 and not value.is_complex():
            return _OnDevice(value.detach())
        try:
            return float(value.item())
        except (RuntimeError, TypeError):
            if value.numel() == 1 and not value.is_complex():
                raise  # for example an error of a device, which explains the failure better
            received = f"a tensor of shape {list(value.shape)}, {value.dtype}"
            raise _no_scalar(name, received, "Reduce it first, for example by .mean().") from None
    if isinstance(value, str | bytes):
        raise _no_scalar(name, repr(value)[:80], "Print text instead. The output merges equal lines of the replicas.")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _no_scalar(name, f"{type(value).__name__}: {repr(value)[:80]}", "Pass one value of it.") from None


def _no_scalar(name: str, received: str, cure: str) -> OptionError:
    return OptionError(f"live({name}=…) draws single numbers and got {received}. {cure}")


class TextProgress:
    """A text display for a terminal or a log: a line with the step and the latest values, printed periodically and at
    the end.

    Args:
        stream: The stream to write to; None for stderr.
        clock: A function that returns seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._axis = step_count.Axis()
        self._step = 0
        self._run = ""
        self._point: Point = {}  # the latest value of each name
        self._written: float | None = None
        self._is_new = False

    def __call__(self, point: Point, place: step_count.StepPosition, run: str = "") -> None:
        """Accept a point, and write a line if enough time has passed since the last."""
        now, (step, call) = self._clock(), place
        if run != self._run:
            self.finish()  # write the last point of the previous run
            self._run, self._point = run, {}
        self._step = self._axis.put((max(step, 1), call), point)
        self._point, self._is_new = {**self._point, **point}, True
        if self._written is None:
            self._written = now
            atexit.register(self.finish)
        if now - self._written >= (1.0 if (self._stream or sys.stderr).isatty() else 10.0):
            self._written = now
            self.finish()

    def finish(self) -> None:
        """Write the latest values, unless they have already been written."""
        if self._is_new:
            self._is_new = False
            values = (f"{name} {_shown(value)}" for name, value in self._point.items())
            head = filter(None, [self._run, f"step {self._step}"])
            print(" · ".join([*head, *values]), file=self._stream or sys.stderr, flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "/".join(_shown(component) for component in value.values())
    return f"{float(value):.4g}"


_progress = TextProgress()


def _terminal(point: Point, place: step_count.StepPosition, run: str) -> None:
    """Write the point in a script. Only replica 0 writes."""
    process = this_process.replica  # None in a script that has not used a strategy yet
    rank = process.rank if process is not None else int(os.environ.get("RANK", "0"))
    if rank == 0:
        _progress(point, place, run)
