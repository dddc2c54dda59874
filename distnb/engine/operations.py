"""What handles ask of the objects they stand for: attributes, items, calls, whole copies."""

from __future__ import annotations

import io
import types
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distnb.engine.descriptions import own_part, summarise
from distnb.engine.objects import Space
from distnb.errors import NamespaceError, StaleHandleError
from distnb.input.dataset import DistributedIterator
from distnb.strategies.scope import drift_report, is_mirrored, read_together, spec_of
from distnb.values import DistributedValues
from distnb.wire.bindings import Described, Leaf, Request, follow
from distnb.wire.codec import Parcel
from distnb.wire.graph import GraphPickler, GraphUnpickler, pack_all
from distnb.wire.messages import Apply, ObjectId
from distnb.wire.twins import NOT_THERE, is_value_twin

if TYPE_CHECKING:
    from distnb.engine.namespace import EngineNamespace

__all__ = ["QUIET", "carry_out"]

QUIET = frozenset({"export", "fetch", "import", "rename", "summary"})
"""Operations that run nothing of the user's which could communicate."""

_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def carry_out(namespace: EngineNamespace, message: Apply) -> Any:
    """Carry out one operation. Its effects on the namespace are described as those of a call are.

    Raises:
        StaleHandleError: The object is not here.
        BaseException: What the operation itself raises.
    """
    if message.operation == "rename":
        namespace.objects.rename(*message.payload)
        return None
    request: Request = message.payload
    delivery = request.delivery
    space = namespace.objects.space(delivery.space)
    replica = namespace.replica_in(delivery.space)
    spectator = request.answers is not None and replica not in request.answers
    if spectator or message.operation in _TRANSFERS:
        namespace.open(delivery, replica)
        return None if spectator else _TRANSFERS[message.operation](namespace, space, request)
    args, kwargs = namespace.open_call(delivery, replica)
    target = follow(_object(space, message.target), request.path)
    if message.operation in ("list", "next"):
        items = list(target) if message.operation == "list" else _next(target)
        # A batch is a structure of slices, as where the notebook's own cells read a dataset.
        batch = isinstance(target, DistributedIterator)
        describe = namespace.describer.tree if batch else namespace.describer.items
        return namespace.finish_with(lambda space, serial: describe(items, space, serial))
    result = _OPERATIONS[message.operation](target, args, kwargs)
    if isinstance(result, _Answer):
        return namespace.finish_with(lambda space, serial: result.value)
    if message.operation == "get" and isinstance(result, _METHODS) and getattr(result, "__self__", None) is not None:
        # The handle calls it by its path: nothing is kept here for it.
        return namespace.finish_with(
            lambda space, serial: Leaf(Described("object", summary=summarise(result), value="method"))
        )
    return namespace.finish_with(lambda space, serial: Leaf(namespace.describer.value(result, space, (serial, "r"))))


class _Answer:
    """A result that goes back as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _object(space: Space, identity: ObjectId) -> Any:
    found = space.twins.get(identity)
    if found is NOT_THERE:
        raise StaleHandleError(
            f"Replica {space.replica} has no object for this handle: the name was never assigned on it, "
            "or the object was freed."
        )
    if isinstance(found, DistributedValues) and len(found.values) == 1:
        return found.values[0]
    return found


# -- operations on one object --------------------------------------------------------------------------------------


def _get(target: Any, args: Any, kwargs: Any) -> Any:
    return target


def _next(target: Any) -> list[Any]:
    """The next item of an iterator; empty at its end."""
    try:
        return [next(target)]
    except StopIteration:
        return []


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _apply(target: Any, args: Any, kwargs: Any) -> Any:
    function, *given = args
    return function(*map(own_part, given), **kwargs)


def _check(target: Any, args: Any, kwargs: Any) -> Any:
    return drift_report(target)


def _read(target: Any, args: Any, kwargs: Any) -> Any:
    return read_together(target)


def _read_summary(target: Any, args: Any, kwargs: Any) -> _Answer:
    return _Answer(replace(summarise(target, brief=True), text=summarise(read_together(target)).text))


def _summary(target: Any, args: Any, kwargs: Any) -> _Answer:
    return _Answer(summarise(target))


_OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "apply": _apply,
    "call": _call,
    "check": _check,
    "get": _get,
    "read": _read,
    "read_summary": _read_summary,
    "summary": _summary,
}


# -- whole objects -------------------------------------------------------------------------------------------------


def _fetch(namespace: EngineNamespace, space: Space, request: Request) -> Parcel:
    """Copies of several objects, in one pickle: what they share, their copies share.

    What the notebook holds itself goes by reference, so a copied container holds the notebook's own objects.
    """
    values = [own_part(_object(space, identity)) for identity in request.targets]
    by_reference = {key: identity for key, identity in space.twins.ids.items() if is_value_twin(identity)}
    file = io.BytesIO()
    pickler = GraphPickler(file, namespace.side, by_reference)
    try:
        return pack_all(pickler, file, [values])
    except Exception as error:
        shown = type(values[0]).__qualname__
        raise NamespaceError(
            f"An object of type {shown} cannot be copied to the notebook: {error}. Work with it in a distributed cell."
        ) from error


def _export(namespace: EngineNamespace, space: Space, request: Request) -> tuple[Parcel, tuple[ObjectId, ...]]:
    """The notebook's objects and the mirrored ones, for an engine that takes a lost one's place."""
    wanted = {identity: space.twins.get(identity) for identity in request.targets}
    wanted.update(
        {identity: obj for identity, obj in space.twins.items() if is_value_twin(identity) or is_mirrored(obj)}
    )
    ready = {identity: obj for identity, obj in wanted.items() if obj is not NOT_THERE and _packable(namespace, obj)}
    file = io.BytesIO()
    owned = {identity: (obj, spec_of(obj)) for identity, obj in ready.items()}
    return pack_all(GraphPickler(file, namespace.side, {}), file, [owned]), tuple(ready)


def _packable(namespace: EngineNamespace, obj: Any) -> bool:
    try:
        pack_all(GraphPickler(file := io.BytesIO(), namespace.side, {}), file, [obj])
    except Exception:  # noqa: BLE001
        return False
    return True


def _import(namespace: EngineNamespace, space: Space, request: Request) -> None:
    assert request.blob is not None
    found = GraphUnpickler(request.blob, namespace.side, lambda pid: NOT_THERE).load()
    for identity, (obj, spec) in found.items():
        space.twins.add(identity, obj)
        namespace.adopt(obj, spec)


_TRANSFERS: dict[str, Callable[[Any, Space, Request], Any]] = {"export": _export, "fetch": _fetch, "import": _import}
