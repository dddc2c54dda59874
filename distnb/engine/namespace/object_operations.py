"""The operations that handles request on their objects: attributes, items, calls and copies."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from distnb.engine.namespace.copied_objects import common_parts, origin_of, register_copied
from distnb.engine.namespace.descriptions import own_part, summarise, summarise_read
from distnb.engine.namespace.engine_namespace import EngineNamespace
from distnb.engine.namespace.engine_objects import NOT_THERE, EngineObjects
from distnb.engine.namespace.shared_cores import share_cores
from distnb.errors import NamespaceError, StaleHandleError
from distnb.input.dataset import DistributedDataset, DistributedIterator, sent_to_new_replicas
from distnb.objects.packing import Packed
from distnb.objects.placeholder import Placeholder
from distnb.runtime import randomness, spmd
from distnb.runtime.consistency import sync_check
from distnb.runtime.inspection.holdings import holdings_of
from distnb.runtime.inspection.inspecting import inspect
from distnb.runtime.scopes.divided_objects import (
    divide_again,
    gather_for_others,
    is_divided,
    is_movable,
    sent_to_others,
)
from distnb.runtime.scopes.mirrored_objects import read_together
from distnb.runtime.scopes.replica_parts import hand_over, is_part
from distnb.runtime.this_process import this_process
from distnb.strategies.base import resolve
from distnb.values import DistributedValues
from distnb.wire.described_values import METHOD, Summary
from distnb.wire.exchange import Request, Settlement, TeamKey, follow
from distnb.wire.messages import Apply, ObjectId
from distnb.wire.value_facts import Inspected

__all__ = ["QUIET", "carry_out"]

QUIET = frozenset(
    {
        "bind",
        "copies",
        "copying",
        "export",
        "fetch",
        "holdings",
        "import",
        "inspect",
        "nbytes",
        "rename",
        "revive",
        "summary",
        "threads",
        "try",
        "writes",
    }
)
"""The operations that run no user code that could communicate."""

_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def carry_out(namespace: EngineNamespace, message: Apply) -> Any:
    """Carry out one operation, and describe its effects on the namespace like those of a call.

    Raises:
        StaleHandleError: The object is not on this replica.
        BaseException: The operation itself raised it.
    """
    if message.operation == "rename":
        namespace.teams.rename(*message.payload)
        return None
    if message.operation == "copying":
        namespace.teams.incomplete = message.payload
        return None
    if message.operation == "threads":
        share_cores(message.payload)
        return None
    if message.operation == "settle":
        return _settle(namespace, message.payload)
    if message.operation == "divide":
        return _divide(namespace, message.payload)
    if message.operation == "writes":
        return this_process.replica.writes() if this_process.replica is not None else {}
    request: Request = message.payload
    snapshot = request.snapshot
    objects = namespace.teams.of(snapshot.team)
    replica = namespace.replica_in(snapshot.team)
    # Spectators only open the snapshot. For "bind" all replicas are.
    spectator = request.answers is not None and replica not in request.answers
    if spectator or message.operation in _TRANSFERS:
        namespace.open(snapshot, replica)
        if spectator and message.operation == "import":
            _deal_again(objects)
        return None if spectator else _TRANSFERS[message.operation](namespace, objects, request)
    args, kwargs = namespace.open_call(snapshot, replica)
    if message.operation in _PLACES:
        answer = _PLACES[message.operation](_owned(objects, message.target))
        return namespace.finish_with(lambda describer: answer)
    target = follow(_object(objects, message.target), request.path)
    if message.operation == "next":
        items = _next(target)
        if isinstance(target, DistributedIterator):
            # The batch is described as a structure of slices, as when the notebook's own cells read a dataset.
            return namespace.finish_with(lambda describer: describer.tree(items))
        return namespace.finish_operation(items)
    if message.operation in _SUMMARIES:
        summary = _SUMMARIES[message.operation](target)
        return namespace.finish_with(lambda describer: summary)
    result = _OPERATIONS[message.operation](target, args, kwargs)
    if message.operation == "get" and isinstance(result, _METHODS) and getattr(result, "__self__", None) is not None:
        return namespace.finish_with(lambda describer: METHOD)  # which is not kept here
    # Most results of operators are operands of others. Their texts are fetched when they are shown.
    brief = message.operation == "apply"
    return namespace.finish_operation([result], brief=brief)


def _object(objects: EngineObjects, identity: ObjectId) -> Any:
    found = _owned(objects, identity)
    if isinstance(found, DistributedValues) and len(found.values) == 1:
        return found.values[0]
    return found


def _owned(objects: EngineObjects, identity: ObjectId) -> Any:
    found = objects.owned.get(identity, NOT_THERE)
    if found is NOT_THERE:
        raise StaleHandleError(
            f"Replica {objects.replica} has no object for this handle: its cell never assigned the name, or the object "
            "was freed."
        )
    return found


# -- operations on one object --------------------------------------------------------------------------------------


def _next(target: Any) -> list[Any]:
    """Return a list with the next item of an iterator, or an empty list at its end."""
    try:
        return [next(target)]
    except StopIteration:
        return []


def _apply(target: Any, args: Any, kwargs: Any) -> Any:
    function, *given = args
    return function(*map(own_part, given), **kwargs)


_OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "apply": _apply,
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "check": lambda target, args, kwargs: _drift_report(target),
    "get": lambda target, args, kwargs: target,
    "list": lambda target, args, kwargs: list(target),
    "read": lambda target, args, kwargs: read_together(target),
}
_PLACES: dict[str, Callable[[Any], Any]] = {
    "holdings": holdings_of,
    "nbytes": lambda target: sum(each.nbytes for each in holdings_of(target)),
}
_SUMMARIES: dict[str, Callable[[Any], Summary | Inspected]] = {
    "inspect": lambda target: inspect(own_part(target)),
    "read_summary": summarise_read,
    "summary": summarise,
}


# -- whole objects -------------------------------------------------------------------------------------------------


def _fetch(namespace: EngineNamespace, objects: EngineObjects, request: Request) -> Packed:
    """Pack copies of several objects in one pickle, so that the copies share what the objects share."""
    values = [own_part(_object(objects, identity)) for identity in request.targets]
    try:
        return namespace.teams.copies().pack_loose({f"@{place}": value for place, value in enumerate(values)})
    except Exception as error:
        shown = type(values[0]).__qualname__
        raise NamespaceError(
            f"An object of type {shown} cannot be copied to the notebook: {str(error).rstrip('.')}. Work with it in a "
            "distributed cell."
        ) from error


def _copies(namespace: EngineNamespace, objects: EngineObjects, request: Request) -> Packed:
    """Pack copies of several objects as `_fetch` does, with a placeholder for each that cannot be copied."""
    values = {f"@{place}": own_part(_object(objects, identity)) for place, identity in enumerate(request.targets)}
    return namespace.teams.copies().pack_loose(values, apart=True)


def _export(
    namespace: EngineNamespace, objects: EngineObjects, request: Request
) -> tuple[Packed, tuple[ObjectId, ...], bytes, bool]:
    """Pack what the replicas have in common, for new engines: objects with their ids, and random states.

    The objects are those of mirrored handles, and those that hold mirrored objects or datasets. An object that cannot
    be packed becomes a placeholder. Shards are packed without values.

    Returns:
        The pack, the ids, the random states, and whether there are shards.
    """
    parts = {
        identity: within
        for identity, obj in objects.owned.items()
        if identity not in request.left_out and not isinstance(obj, DistributedDataParallel)
        if not _has_fixed_shards(within := list(common_parts(obj)))
    }
    wanted = [identity for identity, within in parts.items() if within or identity in request.targets]
    values = {
        str(place): (objects.owned[identity], [(part, origin_of(part)) for _, part in parts[identity]])
        for place, identity in enumerate(wanted)
    }
    divided = [part for within in parts.values() for _, part in within if is_divided(part)]
    with sent_to_new_replicas(), sent_to_others(divided):
        pack = namespace.teams.copies().pack_loose(values, apart=True)
    return pack, tuple(wanted), randomness.captured(), bool(divided)


def _has_fixed_shards(parts: list[tuple[str, Any]]) -> bool:
    """Return whether the common parts of an object include shards that cannot be divided over other replicas."""
    return not all(is_movable(part) for _, part in parts)


def _deal_again(objects: EngineObjects) -> None:
    """Deal distributed datasets again when they are next read, together with replicas that have just been added."""
    for obj in objects.owned.values():
        for _, part in common_parts(obj):
            if isinstance(part, DistributedDataset | DistributedIterator):
                part.deal_again()


def _settle(namespace: EngineNamespace, settlement: Settlement) -> tuple[tuple[ObjectId, ...], bool]:
    """Prepare for another number of replicas.

    Register what scopes have made, hand over the parts of common values, and gather shards. They are taken over when
    the group is renamed, and divided again after that, since the change may still be given up. All replicas call this.

    Returns:
        The ids of the objects that the replicas have in common, and whether there are shards.
    """
    process = this_process.replica
    assert process is not None, "an engine runs this as a replica"
    process.settle(settlement.strategies)
    objects = namespace.teams.of(settlement.team)
    common: list[ObjectId] = []
    parts: dict[str, Any] = {}
    known: set[int] = set()
    for identity in sorted(objects.owned):
        within = list(common_parts(objects.owned[identity], with_archived=True))
        common += [identity] if within and not _has_fixed_shards(within) else []
        for path, part in within:
            if is_part(part) and id(part) not in known:
                known.add(id(part))
                parts[f"{identity}{path}"] = part
    objects.inherit = hand_over(process.group, parts, settlement.leaving)
    divided = _divided_in(objects)
    has_shards = any(process.group.all_gather_object(bool(divided)))
    if has_shards:
        heir = min(rank for rank in range(process.size) if rank not in settlement.leaving)
        objects.gathered = gather_for_others(process.group, divided, heir)
    return tuple(common), has_shards


def _divided_in(objects: EngineObjects) -> dict[str, Any]:
    """Return the objects of which this replica holds shards, by names that are equal on all replicas."""
    return {
        f"{identity}{path}": part
        for identity in sorted(objects.owned)
        if not _has_fixed_shards(within := list(common_parts(objects.owned[identity], with_archived=True)))
        for path, part in within
        if is_divided(part)
    }


def _divide(namespace: EngineNamespace, team: TeamKey) -> None:
    """Divide shards over the replicas of a team that has changed. All replicas call this."""
    process = this_process.replica
    assert process is not None, "an engine runs this as a replica"
    objects = namespace.teams.of(team)
    gathered, objects.gathered = objects.gathered, []
    divide_again(process, _divided_in(objects), gathered, resolve)


def _import(
    namespace: EngineNamespace, objects: EngineObjects, request: Request, *, with_parts: bool = False
) -> ObjectId | None:
    """Keep the objects in another replica's pack. With `with_parts`, also its parts of values of all replicas.

    Return None; or, if one of the objects cannot be opened here, its id. Then none of them is kept, because others may
    share objects with it.
    """
    opened, unopened = _opened(objects, request)
    if unopened is not None:
        return unopened
    spmd.register_random(request.random)
    registered: set[int] = set()
    for identity, (obj, parts) in zip(request.targets, opened, strict=True):
        objects.own(identity, obj)
        for part, origin in parts:
            if id(part) not in registered:
                registered.add(id(part))
                register_copied(part, origin, with_parts=with_parts)
    return None


def _try(namespace: EngineNamespace, objects: EngineObjects, request: Request) -> ObjectId | None:
    """Open a pack of objects, and keep none of them. Return as `_import` does."""
    return _opened(objects, request)[1]


def _opened(objects: EngineObjects, request: Request) -> tuple[list[Any], ObjectId | None]:
    """Open a pack of objects. Return them, and the id of one that cannot be opened or None."""
    assert request.pack is not None
    opened = [*objects.tracker.open_loose(request.pack).values()]
    for identity, value in zip(request.targets, opened, strict=True):
        if type(value) is Placeholder or type(value[0]) is Placeholder:
            return opened, identity
    return opened, None


_TRANSFERS: dict[str, Callable[[EngineNamespace, EngineObjects, Request], Any]] = {
    "copies": _copies,
    "export": _export,
    "fetch": _fetch,
    "import": _import,
    "revive": partial(_import, with_parts=True),
    "try": _try,
}


def _drift_report(value: Any) -> str:
    """Report whether the replicas hold the same bits of an object. Each of them calls this with its own."""
    assert this_process.replica is not None, "an engine runs this as a replica"
    return sync_check.drift_report(this_process.replica.group, value)
