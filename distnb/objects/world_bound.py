"""Classes of other libraries whose objects know the processes that they were made in, and are of no use in others."""

from __future__ import annotations

from distnb.compat import accelerate_internals, lightning_internals, transformers_internals

__all__ = ["is_training_arguments", "is_world_bound"]

_WORLD_BOUND = accelerate_internals.BOUND | lightning_internals.BOUND | transformers_internals.BOUND


def is_world_bound(kind: type) -> bool:
    """Return whether objects of a class know how many processes there were, and which one is theirs."""
    return not _names_of(kind).isdisjoint(_WORLD_BOUND)


def is_training_arguments(kind: type) -> bool:
    """Return whether objects of a class find the processes again."""
    return not _names_of(kind).isdisjoint(transformers_internals.ARGUMENTS)


def _names_of(kind: type) -> set[tuple[str, str]]:
    """Return the names of a class and of its bases: no library is loaded to be asked for them."""
    return {(base.__module__, base.__qualname__) for base in kind.__mro__}
