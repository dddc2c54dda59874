"""Effects on their way to the notebook: which of the new objects go by value, and which stay behind a handle."""

from __future__ import annotations

import enum
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distnb.engine.descriptions import Describer
from distnb.engine.objects import Space
from distnb.strategies.scope import is_mirrored
from distnb.values import DistributedValues
from distnb.wire.bindings import Described
from distnb.wire.codec import Parcel
from distnb.wire.digests import DIGEST_NBYTES, is_array, is_tensor, mark_of_content
from distnb.wire.fingerprints import fingerprint
from distnb.wire.frozen import REPLACED, hide_outdated
from distnb.wire.graph import _SENDABLE_IO, _UNSENDABLE, GraphPickler, Side
from distnb.wire.messages import ObjectId
from distnb.wire.nodes import FROZEN, is_node, state_of
from distnb.wire.twins import NOT_THERE, Twins, is_value_twin

__all__ = ["Luggage", "pack_effects"]

_SMALL_NBYTES = 1 << 16
_ALWAYS_BY_VALUE = (
    list,
    dict,
    set,
    tuple,
    frozenset,
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
)


@dataclass
class Luggage:
    """What `pack_effects` made.

    Attributes:
        memo: Objects of the pickle by memo index, twins once the notebook confirms.
        fresh: Engine objects that it refers to and that got an id just now.
        changed: The digest of each changed object's new state.
    """

    blob: Parcel | None
    updates: int
    memo: dict[int, Any]
    fresh: dict[ObjectId, Described]
    changed: dict[ObjectId, bytes]


class _Stays(dict[type, Callable[[Any], Any] | None]):
    """The rule for each type of object: stays here behind a handle (the rule gives its id), or goes by value."""

    def __init__(self, register: Callable[[Any], ObjectId], twins: Twins, *, strict: bool) -> None:
        super().__init__()
        self._register = register
        self._twins = twins
        self.contents: set[int] = set()  # `id()` of tensors that are the content of one of the notebook's
        self._strict = strict

    def get(self, kind: Any, default: Any = None) -> Any:
        try:
            return self[kind]
        except KeyError:
            rule = self[kind] = self._decide(kind)
            return rule

    def _decide(self, kind: type) -> Callable[[Any], Any] | None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if issubclass(kind, DistributedValues) or (
            issubclass(kind, _UNSENDABLE) and not issubclass(kind, _SENDABLE_IO)
        ):
            return self._register
        if numpy is not None and issubclass(kind, numpy.ndarray):
            return None  # tables and estimators could not hold handles of their arrays
        if torch is not None and issubclass(kind, torch.Tensor):
            return self._if_large
        if torch is not None and issubclass(
            kind, torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
        ):
            return self._register
        if kind.__module__.split(".")[0] == "distnb" and _may_be_node(kind):
            return self._register
        if self._strict and not issubclass(kind, _ALWAYS_BY_VALUE) and _may_be_node(kind):
            return lambda obj: self._register(obj) if is_node(obj) else None
        return None

    def _if_large(self, obj: Any) -> ObjectId | None:
        if id(obj) in self.contents:
            return None
        by_value = is_tensor(obj) and obj.nbytes <= _SMALL_NBYTES and not is_mirrored(obj)
        if not by_value or (getattr(obj, "requires_grad", False) and not obj.is_leaf):
            return self._register(obj)  # a copy would be cut off from the graph
        # A copy would be cut off from what lies in the same memory here, and stays here.
        stays = any(not is_value_twin(identity) for identity, _ in self._twins.neighbours(obj))
        return self._register(obj) if stays else None


def _may_be_node(kind: type) -> bool:
    """Whether instances of a type may be nodes: classes and enumerations are none."""
    return not issubclass(kind, enum.Enum | type)


def pack_effects(
    code: dict[str, Any],
    changed: Mapping[ObjectId, bytes | None],
    space: Space,
    side: Side,
    serial: int,
    describer: Describer,
) -> Luggage:
    """Pack functions and classes that a program defined, and the new states of the notebook's objects it changed.

    Args:
        code: Functions and classes by name.
        changed: The notebook's objects to describe; of arrays and tensors their content's digest, if it is known.
    """
    if not code and not changed:
        return Luggage(None, 0, {}, {}, {})
    try:
        return _pack(code, changed, space, side, serial, describer, strict=False)
    except Exception:  # noqa: BLE001
        # Something new in there cannot be pickled. Now every object that is no plain container stays here.
        return _pack(code, changed, space, side, serial, describer, strict=True)


def _pack(
    code: dict[str, Any],
    changed: Mapping[ObjectId, bytes | None],
    space: Space,
    side: Side,
    serial: int,
    describer: Describer,
    *,
    strict: bool,
) -> Luggage:
    twins = space.twins
    outdated = hide_outdated([identity for identity in changed if is_value_twin(identity)], side, twins)
    fresh: dict[ObjectId, Described] = {}
    kept: list[Any] = []

    def register(obj: Any) -> ObjectId:
        identity = twins.id_of(obj)
        if identity is None:
            identity = (serial, f"@{len(kept)}")
            kept.append(obj)
            twins.add(identity, obj)
            fresh[identity] = describer.object(obj, space, identity)
        return identity

    file = io.BytesIO()
    rules = _Stays(register, twins, strict=strict)
    pickler = GraphPickler(file, side, twins.ids, rules)
    pickler.neighbours = twins.neighbours
    pickler.dump(code)
    digests: dict[ObjectId, bytes] = {}
    for identity in changed:
        node = twins.get(identity)
        if node is NOT_THERE or not is_value_twin(identity):
            continue
        content = changed[identity] or mark_of_content(node) if is_array(node) or is_tensor(node) else None
        if content is not None and twins.contents.get(identity) == content:
            continue
        kind, state = state_of(node)
        # What the notebook's own tensors hold goes to it, however large.
        rules.contents = {id(part) for part in state if is_tensor(part)} if kind == "tensor" else set()
        if identity in outdated:
            pickler.dump((identity, REPLACED, node))
        elif kind != FROZEN:
            pickler.dump((identity, kind, state))
        else:
            continue
        if content is None or len(content) > DIGEST_NBYTES:  # it has more than elements
            content = _digest(kind, state, space, side)
        digests[identity] = content
    memo = {index: obj for index, obj in pickler.memo.copy().values() if is_node(obj)}
    return Luggage(Parcel([file.getbuffer(), *pickler.buffers]), len(digests), memo, fresh, digests)


def _digest(kind: str, state: Any, space: Space, side: Side) -> bytes:
    try:
        return fingerprint((kind, state), side, space.twins, by_reference="all").digest
    except Exception:  # noqa: BLE001
        return b""  # never equal to another replica's
