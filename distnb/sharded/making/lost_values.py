"""Sharded tensors whose values are lost, because an engine with some of their shards has ended.

Using them raises an error until a checkpoint has set them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distnb.compat import torch_internals
from distnb.errors import StaleHandleError
from distnb.sharded.making.initial_values import blank, is_filled

__all__ = ["any_lost", "lose", "lost_error", "require_values"]

_lost = WeakIdKeyDictionary()


def lose(tensor: torch.Tensor) -> None:
    """Note that the values of a sharded tensor are lost."""
    blank(torch_internals.local_tensor(tensor))
    _lost[tensor] = True


def any_lost(tensors: Iterable[Any]) -> bool:
    """Return whether the values of a tensor, or of one that shares its memory, are lost, and nothing has set them."""
    if not _lost:
        return False
    by_memory = {_memory(each): each for each in list(_lost)}
    for tensor in tensors:
        lost = None if torch_internals.local_tensor(tensor) is None else by_memory.get(_memory(tensor))
        if lost is not None and not is_filled(torch_internals.local_tensor(lost)):
            return True
        if lost is not None:
            _lost.pop(lost, None)
    return False


def _memory(tensor: Any) -> int:
    return torch_internals.identity_of_storage(torch_internals.local_tensor(tensor).untyped_storage())


def require_values(tensors: Iterable[Any], what: str) -> None:
    """Raise StaleHandleError if the values of a tensor are lost. `what` describes the tensors."""
    if any_lost(tensors):
        raise lost_error(what)


def lost_error(what: str, *, divided: bool = True) -> StaleHandleError:
    """Return the error for lost values.

    Args:
        what: A description of the tensors.
        divided: Whether the tensors are divided over the current replicas, so that a checkpoint can set them.
    """
    first = "Restore"
    last = "The cell that made the model need not run again."
    if not divided:
        first = "If an engine is missing, replace it (%distnb restart --missing). Then restore"
        last = "After a resize, make Keras models and results of autograd again, which it does not keep."
    return StaleHandleError(
        f"The values of {what} are lost, because an engine that held shards has ended or left. {first} a checkpoint: "
        f"distnb.Checkpoint(model=model, optimizer=optimizer).restore(path). {last}"
    )
