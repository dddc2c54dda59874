"""Classes of other libraries whose objects store the processes that they were made in, and are useless in others."""

from __future__ import annotations

from distnb.compat import accelerate_internals, lightning_internals, transformers_internals

__all__ = ["is_training_arguments", "is_world_bound"]

_WORLD_BOUND = accelerate_internals.BOUND | lightning_internals.BOUND | transformers_internals.BOUND


def is_world_bound(kind: type) -> bool:
    """Return whether objects of a class store the number of processes and their own process's rank."""
    return not _names_of(kind).isdisjoint(_WORLD_BOUND)


def is_training_arguments(kind: type) -> bool:
    """Return whether objects of a class can determine the processes again."""
    return not _names_of(kind).isdisjoint(transformers_internals.ARGUMENTS)


def _names_of(kind: type) -> set[tuple[str, str]]:
    """Return the names of a class and of its bases. Comparing names loads no library."""
    return {(base.__module__, base.__qualname__) for base in kind.__mro__}
