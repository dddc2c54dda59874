"""What the replicas' descriptions of one thing say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distnb.session.spaces import MISSING
from distnb.wire.bindings import NO_SCALAR, Described, Effects, Leaf, Returned
from distnb.wire.immutables import same

__all__ = ["agreed_scalar", "are_equal", "leaves_of"]


def leaves_of(tree: Any) -> list[Leaf]:
    """The leaves of a result's structure."""
    from distnb.values import structure

    if tree is None or isinstance(tree, Leaf):
        return [] if tree is None else [tree]
    return [leaf for leaf in structure.flatten(tree)[0] if isinstance(leaf, Leaf)]


def agreed_scalar(effects: Iterable[Effects | Returned]) -> Any:
    """The scalar that all replicas returned, if that is all that they have to tell; else MISSING."""
    found: Any = MISSING
    for one in effects:
        value = one.scalar
        if value is NO_SCALAR or (found is not MISSING and not same(found, value)):
            return MISSING
        found = value
    return found


def are_equal(facts: Mapping[int, Described]) -> bool:
    """Whether what was described is the same on every replica."""
    described = list(facts.values())
    if any(one.wrapped for one in described):
        return False
    if all(one.mirrored for one in described):
        return True
    return described[0].digest is not None and len({one.digest for one in described}) == 1
