"""Objects that cannot take on another's content (a pandas block manager, an iterator): a changed one is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distnb.wire.digests import is_array, is_tensor
from distnb.wire.fingerprints import fingerprint
from distnb.wire.graph import Side
from distnb.wire.messages import ObjectId
from distnb.wire.nodes import FROZEN, HOLDERS, state_of
from distnb.wire.twins import NOT_THERE, Twins

__all__ = ["REPLACED", "hide_outdated", "note_frozen"]

REPLACED = "replaced"
"""The kind of an update whose state is the new object itself."""

Rules = dict[type, Callable[[Any], Any]] | None
_NEVER = (list, dict, set, str, bytes)


def _digest(node: Any, side: Side, twins: Twins, rules: Rules) -> Any:
    """The digest of what a frozen object was made of, of a tuple the ids of its parts; None for all others."""
    if type(node) in HOLDERS:
        return twins.parts_of(node)
    if node is NOT_THERE or type(node) in _NEVER or isinstance(node, type) or is_array(node) or is_tensor(node):
        return None
    kind, state = state_of(node)
    if kind != FROZEN:
        return None
    return fingerprint(state, side, twins, rules, by_reference="all").digest


def note_frozen(identities: Iterable[ObjectId], side: Side, twins: Twins, rules: Rules = None) -> None:
    """Remember the content of the frozen objects among some, as both sides have it now."""
    for identity in identities:
        digest = _digest(twins.get(identity), side, twins, rules)
        if digest is not None:
            twins.contents[identity] = digest


def hide_outdated(identities: Iterable[ObjectId], side: Side, twins: Twins, rules: Rules = None) -> list[ObjectId]:
    """Find the frozen objects among some that changed, and hide them, so that they are pickled as new ones.

    Those that hold one of them change with it: the other side cannot give them the new part.

    Returns:
        Their ids.
    """
    frozen = {identity: None for identity in identities if _digest(twins.get(identity), side, twins, rules) is not None}
    outdated: list[ObjectId] = []
    grew = True
    while grew:
        grew = False
        for identity in list(frozen):
            if _differ(twins.contents.get(identity), _digest(twins.get(identity), side, twins, rules)):
                twins.hide(identity)
                outdated.append(identity)
                del frozen[identity]
                grew = True
    return outdated


def _differ(then: Any, now: Any) -> bool:
    if type(then) is tuple and type(now) is tuple:  # a part may have got its first id since
        return any(one is not None and one != other for one, other in zip(then, now, strict=True))
    return bool(then != now)
