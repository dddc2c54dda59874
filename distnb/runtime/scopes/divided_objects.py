"""Objects that are divided over the replicas: each replica holds a part of an object, or of a module's parameters.

A feature describes its kind of such objects by a `DividedKind` at the extension point "divided objects". It also
registers the kind (`register_divided`) on each replica that may have one, so that questions about a value cost nothing
before. When the replicas of a cluster change, all of them take part:

    gather      the old replicas    the parts are gathered by the first replica that stays
    sent        one of them         packs objects without the values of parts, for the new replicas
    divide      the new replicas    each keeps its part of what was gathered
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from distnb import features

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group
    from distnb.options import StrategySpec
    from distnb.runtime.spmd import SpmdProcess

__all__ = [
    "DividedKind",
    "divide_again",
    "gather_divided",
    "gather_for_others",
    "is_divided",
    "is_movable",
    "register_divided",
    "require_values",
    "sent_to_others",
]


class DividedKind(NamedTuple):
    """A kind of objects that are divided over the replicas.

    Attributes:
        covers: Returns whether an object is of this kind.
        whole: Returns whole copies of objects, which share what the objects share. All replicas call this, and
            replica 0 gets the content.
        require_values: Raises an error if the values of a tensor are lost. The text describes the tensors.
        is_movable: Returns whether an object can be divided over other replicas.
        sent: Returns a context in which objects can be pickled for new replicas.
        gather: Gathers the parts of objects, by names that are equal on all replicas, on one of the replicas.
        divide: Divides objects over the current replicas, given the result of `gather`, or None, and the function that
            returns the strategy of a spec.
    """

    covers: Callable[[Any], bool]
    whole: Callable[..., list[Any]]
    require_values: Callable[[Iterable[Any], str], None]
    is_movable: Callable[[Any], bool]
    sent: Callable[[Iterable[Any]], AbstractContextManager[None]]
    gather: Callable[[Group, Mapping[str, Any], int], Any]
    divide: Callable[[SpmdProcess, Mapping[str, Any], Any, Callable[[StrategySpec], Any]], None]


_kinds: list[DividedKind] = []


def register_divided(kind: DividedKind) -> None:
    """Register a kind of objects that this replica may have from now on. Idempotent."""
    if kind not in _kinds:
        _kinds.append(kind)


def is_divided(value: Any) -> bool:
    """Return whether each replica holds a shard of an object, or of the parameters of a module or an optimizer."""
    return any(kind.covers(value) for kind in _kinds)


def gather_divided(*values: Any) -> list[Any]:
    """Return whole copies of divided objects of one kind. All replicas must call this function."""
    return next(kind for kind in _kinds if kind.covers(values[0])).whole(*values)


def require_values(tensors: Iterable[Any], what: str) -> None:
    """Raise an error if the values of a tensor are lost. `what` describes the tensors."""
    for kind in _kinds:
        kind.require_values(tensors, what)


# -- other replicas ----------------------------------------------------------------------------------------------------


def is_movable(value: Any) -> bool:
    """Return whether a divided object can be divided over other replicas."""
    return all(kind.is_movable(value) for kind in _kinds if kind.covers(value))


@contextmanager
def sent_to_others(values: Sequence[Any]) -> Iterator[None]:
    """Return a context in which divided objects can be pickled for new replicas, without the values of their parts."""
    with ExitStack() as stack:
        for kind in _kinds:
            if own := [value for value in values if kind.covers(value)]:
                stack.enter_context(kind.sent(own))
        yield


def gather_for_others(group: Group, parts: Mapping[str, Any], heir: int) -> list[Any]:
    """Gather the parts of divided objects on one replica, the heir. All replicas call this, also those without any.

    Args:
        group: The replicas.
        parts: The objects, by names that are equal on all replicas.
        heir: The replica that gets the content.
    """
    return [kind.gather(group, parts, heir) for kind in features.every("divided objects")]


def divide_again(
    process: SpmdProcess,
    parts: Mapping[str, Any],
    gathered: Sequence[Any],
    resolve: Callable[[StrategySpec], Any],
) -> None:
    """Divide objects over the current replicas. All of them call this.

    Args:
        process: This replica.
        parts: The objects, by names that are equal on all replicas.
        gathered: The result of `gather_for_others` on this replica; empty on a new one.
        resolve: Returns the strategy that a spec describes.
    """
    kinds = features.every("divided objects")
    for kind, content in zip(kinds, gathered or [None] * len(kinds), strict=True):
        kind.divide(process, parts, content, resolve)
