"""The namespace of a simulated replica, which opens the notebook's snapshots and describes results without torch.

It follows `distnb.engine.namespace` for plain values, data, functions and tensors. `Tensor` represents a number on the
replica's device, which stays there.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from typing import Any

from distnb.objects.constructors import open_module
from distnb.objects.digesting import Side
from distnb.objects.packing import Packed
from distnb.objects.plain import SCALARS, is_plain
from distnb.objects.tracking import Tracker
from distnb.values import structure
from distnb.wire.described_values import (
    RETURNED,
    Described,
    DescribedObject,
    Leaf,
    PlainValue,
    Result,
    SentValue,
    Summary,
    leaf_name,
)
from distnb.wire.exchange import HeldArgument, NamedArgument, Snapshot, TeamKey, Upkeep, former
from distnb.wire.messages import ObjectId

__all__ = ["Namespace", "Tensor"]

_SHORT_CHARACTERS = 400  # as in distnb.engine.namespace.descriptions


class Tensor:
    """A representation of a tensor without dimensions on a replica. The notebook gets a handle of a torch.Tensor."""

    def __init__(self, number: float) -> None:
        self.number = number


def _is_short(value: Any) -> bool:
    """Return whether a value is sent in its description."""
    return type(value) in SCALARS or (type(value) is str and len(value) < _SHORT_CHARACTERS)


class Namespace:
    """The variables of a simulated replica.

    Args:
        tools: The names that every program can read, although no program has assigned them.

    Attributes:
        serial: The serial of the snapshot that was opened last.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self.variables: dict[str, Any] = {"__builtins__": {**vars(builtins), **tools}}
        self._key: TeamKey | None = None
        self._replica = 0
        self.serial = 0
        self._forget_team()

    def _forget_team(self) -> None:
        self._tracker = Tracker(Side(user_ns=self.variables, references=self))
        self._owned: dict[ObjectId, Any] = {}
        self._ids: dict[int, ObjectId] = {}
        self._plain: dict[str, Any] = {}

    # -- the references of packs ---------------------------------------------------------------------------------------

    def digest_token(self, obj: Any) -> Any:
        """Return the identity of an object behind a handle for the digest, or None."""
        return self.token(obj)

    def referred(self, keys: Iterable[int]) -> set[int]:
        """Return no `id()`, since there are no tensors of torch."""
        return set()

    def token(self, obj: Any) -> Any:
        """Return the id of an object that stays here, or None."""
        return self._ids.get(id(obj)) if type(obj) is Tensor else None

    def send_by_value(self, parts: Any) -> None:
        """Do nothing, since there are no parts of tensors."""

    def resolve(self, token: Any) -> Any:
        """Return the object to which a token in a snapshot refers."""
        return self._owned[token[1]]

    # -- before a program ----------------------------------------------------------------------------------------------

    def open(self, snapshot: Snapshot, replica: int) -> None:
        """Apply a snapshot."""
        if snapshot.team != self._key:
            self._key = snapshot.team
            self._forget_team()
        self._replica, self.serial = replica, snapshot.serial
        self._apply_upkeep(snapshot.upkeep or Upkeep())
        self._bind(snapshot)
        self._snapshot = snapshot
        self._before = dict(self.variables)

    def _apply_upkeep(self, upkeep: Upkeep) -> None:
        tracker = self._tracker
        for identity, what in upkeep.adopt.items():
            given = what if isinstance(what, str) else what.get(self._replica)
            if isinstance(given, str):
                self._own(identity, tracker.root(given))
            elif given is not None:
                self._own(identity, tracker.find(given) if isinstance(given, int) else self._owned[given])
        tracker.retire_numbers(upkeep.unlike_parts)
        for old, new in upkeep.renamed.items():
            tracker.rename(old, new)
        tracker.forget(upkeep.forget)
        if upkeep.fresh:
            tracker.clear()
            self._plain.clear()
        for identity in upkeep.release:
            self._ids.pop(id(self._owned.pop(identity, None)), None)
        tracker.drop_unreferenced()

    def _bind(self, snapshot: Snapshot) -> None:
        bindings, tracker, variables = snapshot.bindings, self._tracker, self.variables
        names: tuple[str, ...] = ()
        if bindings is not None:
            names = bindings.names
            kept = {*names, *bindings.staying, "__builtins__"}
            for name in variables.keys() - kept:
                del variables[name]
            for name, module in bindings.imports.items():
                variables[name] = open_module(module)
            if bindings.plain is not None:
                self._plain.update(tracker.open_loose(bindings.plain))
        arrived: dict[str, Any] = {}
        if snapshot.pack is not None:
            opening = tracker.opening(snapshot.pack)
            for name in snapshot.pack.names:
                value = opening.load(name)
                if name in names:
                    variables[name] = value  # code, which comes first, may be called while other values are opened
            arrived = tracker.merge(opening)
            tracker.accept(arrived)
        for name in names:
            if name in arrived:
                variables[name] = arrived[name]
            elif name in self._plain:
                variables[name] = self._plain[name]
            elif name in tracker:
                variables[name] = tracker.root(name)

    def bind(self, values: Mapping[str, Any]) -> None:
        """Bind names to immutable values or engine objects."""
        self._plain.update(values)
        self.variables.update(values)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call whose snapshot was opened last."""
        given = self._snapshot.arguments
        args, kwargs = self._tracker.open_loose(given)["@"] if isinstance(given, Packed) else given or ((), {})
        return self._with_values(args), self._with_values(kwargs)

    def _with_values(self, arguments: Any) -> Any:
        kind = type(arguments)
        if kind is NamedArgument:
            return self._tracker.root(arguments.name)
        if kind is HeldArgument:
            return self.resolve(arguments.token)
        if kind is dict:
            return {name: self._with_values(value) for name, value in arguments.items()}
        return kind(map(self._with_values, arguments)) if kind in (list, tuple) else arguments

    # -- after a program -----------------------------------------------------------------------------------------------

    def finish(self) -> Result:
        """Describe the effects of a cell."""
        return self._finish({})

    def finish_call(self, result: Any) -> Result:
        """Describe the effects and the result of a call."""
        leaves, shape = structure.flatten(result)
        if len(leaves) == 1 and leaves[0] is result:
            paths = {RETURNED: result}
        else:
            paths = {leaf_name(RETURNED, place): leaf for place, leaf in enumerate(leaves)}
        found = self._finish(paths)
        described = [Leaf(found.names[path]) for path in paths]
        names = {name: each for name, each in found.names.items() if name not in paths}
        return found._replace(names=names, result=structure.unflatten(shape, described))

    def _finish(self, returned: Mapping[str, Any]) -> Result:
        tracker, serial, before = self._tracker, self.serial, self._before
        assigned = {
            name: value for name, value in self.variables.items() if name not in before or before[name] is not value
        }
        values = {name: tracker.root(name) for name in self._snapshot.inquiry.sections if name in tracker}
        for name in assigned:
            if name in tracker:
                new = former(name, serial)
                tracker.rename(name, new)
                values[new] = values.pop(name, tracker.root(new))
        results = {**assigned, **returned}
        data = {path: value for path, value in results.items() if not (is_plain(value) or type(value) is Tensor)}
        changed, pack = self._pack(values, data)
        names = {path: self._described(path, value) for path, value in sorted(results.items())}
        plain = {path: value for path, value in results.items() if is_plain(value) and not _is_short(value)}
        return Result(
            serial=serial,
            names=names,
            deleted=tuple(name for name in before if name not in self.variables),
            changed=changed,
            pack=pack,
            plain=tracker.pack_loose(plain) if plain else None,
        )

    def _pack(self, values: dict[str, Any], data: Mapping[str, Any]) -> tuple[dict[str, bytes | None], Packed | None]:
        if not values and not data:
            return {}, None
        tracker = self._tracker
        every = {**data, **values}
        self._digests = tracker.digest(every)
        names = tracker.lacking(values, self._digests)
        changed: dict[str, bytes | None] = {name: self._digests.by_name[name] for name in names}
        if not names and not data:
            return changed, None
        pack = tracker.pack(self.serial << 1 | 1, every, self._digests, [*names, *data])
        # As in an engine: one replica sends the values that are equal on all.
        return changed, pack.bare() if self._replica and not changed else pack

    def _described(self, path: str, value: Any) -> Described:
        identity = (self.serial, path)
        if _is_short(value):
            return PlainValue(value)
        if is_plain(value):
            return PlainValue(packed=True)
        if type(value) is Tensor:
            summary = Summary(
                type="torch.Tensor", text=None, shape="()", dtype="float32", device="cpu", number=value.number
            )
            digest = f"float32 {value.number!r} False".encode()
            return DescribedObject(identity=self._own(identity, value), digest=digest, summary=summary)
        self._own(identity, value)
        summary = Summary(type=type(value).__name__, text=None, hashing="none")
        return SentValue(DescribedObject(identity=identity, digest=self._digests.by_name[path], summary=summary))

    def _own(self, identity: ObjectId, value: Any) -> ObjectId:
        self._owned[identity] = value
        return self._ids.setdefault(id(value), identity)
