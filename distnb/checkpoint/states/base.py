"""The interface of a kind of object, and outlines of states, which show whether a state matches an object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distnb.checkpoint.stored_tensors import StoredTensor
from distnb.values.structure import map_structure

__all__ = ["Kind", "TensorOutline", "copied", "described", "listed", "misfit_of_tensor", "outline"]

_MANY = 8


@dataclass(frozen=True)
class TensorOutline:
    """A tensor of a checkpoint without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def outline(state: Any) -> Any:
    """Replace the tensors of a state by their outlines: a small tree that can be sent to the object's process."""
    return map_structure(
        lambda leaf: (
            TensorOutline(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, (torch.Tensor, StoredTensor)) else leaf
        ),
        state,
    )


class Kind(ABC):
    """A kind of objects whose states are saved and restored in one way. All replicas call its methods together."""

    @abstractmethod
    def covers(self, value: Any) -> bool:
        """Return whether the object is of this kind."""

    @abstractmethod
    def state(self, value: Any, name: str) -> Any:
        """Return the object's state: a tree of plain values and tensors.

        Args:
            value: The object.
            name: The object's name in errors.
        """

    @abstractmethod
    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        """Return a line for each reason why a state cannot be restored. The object is not changed.

        Args:
            value: The object.
            saved: The outline of the state.
            name: The object's name in the lines.
        """

    @abstractmethod
    def restore(self, value: Any, state: Any, name: str) -> None:
        """Give the object a state that matches. Its tensors may be in files: see `read_like`."""

    def holds_shards(self, value: Any) -> bool:
        """Return whether a tensor of the object is sharded over the replicas, so that each has only its part."""
        return False

    def may_fail(self, value: Any) -> bool:
        """Return whether restoring can raise although `misfits` found nothing, because other code does it."""
        return False

    def before(self, value: Any, name: str) -> Any:
        """Return a copy of the object's current state, for `restore` if restoring fails."""
        return map_structure(copied, self.state(value, name))


def copied(leaf: Any) -> Any:
    """Copy a tensor, or read it from its files; return anything else as it is."""
    if isinstance(leaf, StoredTensor):
        return leaf.read()
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def misfit_of_tensor(own: torch.Tensor | TensorOutline, saved: TensorOutline) -> str | None:
    """Describe how a saved tensor differs from the one that receives it. Return None if it matches."""
    if tuple(own.shape) != saved.shape:
        return f"has shape {list(saved.shape)} in the checkpoint and {list(own.shape)} here"
    if not torch.can_cast(saved.dtype, own.dtype):
        return f"is {saved.dtype} in the checkpoint and {own.dtype} here"
    return None


def described(state: Any) -> str:
    """Return the kind of a state, in words for errors."""
    if isinstance(state, Mapping):
        return f"a dict of {listed(state)}" if state else "an empty dict"
    if isinstance(state, (list, tuple)):
        return f"a list of {len(state)}"
    return "a tensor" if isinstance(state, (TensorOutline, torch.Tensor, StoredTensor)) else f"a {type(state).__name__}"


def listed(names: Iterable[Any]) -> str:
    """List names, the first ones if there are many."""
    every = list(map(str, names))
    more = f" and {len(every) - _MANY} more" if len(every) > _MANY else ""
    return ", ".join(every[:_MANY]) + more
