"""Notifications of the beginning and the end of backward passes.

Every backward pass that Python starts calls one function of `torch.autograd`, which is replaced while there are
listeners. Hooks on the parameters would do the same, but they cost a call per parameter, run on autograd's own threads
(which an interrupt does not reach), and cannot recognise the first gradient of a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from distnb.collectives.eager import always_eager
from distnb.collectives.gradients.replicated_steps import current_step
from distnb.compat import patches, torch_internals

__all__ = ["BACKWARD_PASSES"]

_ENTRY = "torch.autograd:_engine_run_backward"


class PassListener(Protocol):
    """A listener of every outermost backward pass that accumulates into `.grad`."""

    @property
    def aggregates(self) -> bool:
        """True if notifications are needed now: with one replica they are not."""

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        """Handle the beginning of a pass from these outputs."""

    def end(self) -> None:
        """Handle the end of the pass, of passes nested in it, and of passes that other threads ran at the same time."""

    def failed(self) -> None:
        """Handle an error of the pass or of a listener."""

    def computing(self, inputs: Sequence[Any], create_graph: bool) -> AbstractContextManager[Any]:
        """Return a context in which `torch.autograd.grad` computes gradients for these inputs."""


class BackwardPasses:
    """The replacement of autograd's entry point, and the record of running passes.

    A pass nested in another one (reentrant checkpointing) may run on another thread than the outer one, so
    the record belongs to the process and not to a thread. The last pass to end ends them all.

    Attributes:
        nesting_seen: Whether a pass ever ran inside or alongside another. If so, a parameter may get gradients twice in
            one pass.
    """

    def __init__(self) -> None:
        self.nesting_seen = False
        self._listeners: list[PassListener] = []
        self._lock = threading.Lock()
        # No count: a pass that is interrupted before it is recorded would lower it.
        self._running: set[object] = set()
        self._original: Any = None

    def listen(self, listener: PassListener) -> None:
        """Notify this listener of every backward pass from now on."""
        if listener not in self._listeners:
            self._listeners.append(listener)
        if self._original is None:
            self._original = torch_internals.backward_function()
            patches.replace(_ENTRY, self._run)

    def stop_listening(self, listener: PassListener) -> None:
        """Remove a listener. Autograd is restored when there is none left."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        # If other code has wrapped our function meanwhile, it stays and passes everything on.
        if not self._listeners and self._original is not None and torch_internals.backward_function() == self._run:
            patches.replace(_ENTRY, self._original)
            self._original = None

    def any_aggregates(self) -> bool:
        """Return whether a listener aggregates gradients over several replicas in this process now."""
        return any(listener.aggregates for listener in self._listeners)

    def begin_program(self) -> None:
        """Forget the passes of earlier programs."""
        self._running.clear()

    @always_eager
    def _run(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.any_aggregates():
            return self._original(outputs, *args, **kwargs)
        if not kwargs.get("accumulate_grad"):
            return self._run_without_accumulating(outputs, *args, **kwargs)
        this, last = object(), True
        listeners = tuple(self._listeners)
        try:
            try:
                with self._lock:
                    outermost = not self._running
                    self._running.add(this)
                    self.nesting_seen |= not outermost
                if outermost:
                    if (step := current_step()) is not None:
                        step.begin_pass(outputs)
                    create_graph = bool(args[2]) if len(args) > 2 else False
                    for listener in listeners:
                        listener.begin(tuple(outputs), create_graph)
                result = self._original(outputs, *args, **kwargs)
            finally:
                with self._lock:
                    self._running.discard(this)
                    last = not self._running
            if last:
                for listener in listeners:
                    listener.end()
            return result
        except BaseException:
            if last:
                for listener in listeners:
                    listener.failed()
            raise

    def _run_without_accumulating(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()
        create_graph = bool(args[2]) if len(args) > 2 else False
        step = current_step()
        if step is not None:
            step.begin_pass(outputs)
        with ExitStack() as stack:
            for listener in () if self._running else self._listeners:
                stack.enter_context(listener.computing(inputs, create_graph))
            result = self._original(outputs, *args, **kwargs)
        return result if step is None else step.whole_gradients(inputs, result, create_graph)


BACKWARD_PASSES = BackwardPasses()
