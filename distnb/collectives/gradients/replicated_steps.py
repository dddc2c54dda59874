"""Steps that all replicas compute alike with the whole batch, except for calls that they divide, such as Keras's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

__all__ = ["ReplicatedStep", "current_step", "replicating"]


class ReplicatedStep(Protocol):
    """A step whose losses are those of the whole batch on every replica."""

    def begin_pass(self, roots: Sequence[torch.Tensor]) -> None:
        """Prepare the graph of these losses, so that gradients summed over the replicas are those of one process."""

    def whole_gradients(
        self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], create_graph: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the whole gradients in place of this replica's parts, which `torch.autograd.grad` returned."""


_current: ContextVar[ReplicatedStep | None] = ContextVar("replicated step", default=None)


@contextmanager
def replicating(step: ReplicatedStep) -> Iterator[None]:
    """Return a context in which backward passes belong to a step."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def current_step() -> ReplicatedStep | None:
    """Return the step to which a backward pass that begins now belongs, or None."""
    return _current.get()
