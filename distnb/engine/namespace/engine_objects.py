"""The objects of an engine that the notebook knows: its own, by number, and those behind its handles, by id."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, KeysView
from typing import Any

import torch

from distnb.objects.code.definitions import Classes
from distnb.objects.digesting import Side
from distnb.objects.placeholder import Placeholder
from distnb.objects.tracking import Tracker
from distnb.runtime.inspection.device_objects import is_device_object
from distnb.runtime.scopes.mirrored_objects import is_mirrored
from distnb.values import DistributedValues, Mirrored, PerReplica, structure
from distnb.wire.exchange import Renaming, TeamKey
from distnb.wire.messages import ObjectId

__all__ = ["NOT_THERE", "EngineObjects", "EngineReferences", "ObjectsOfTeams"]


class _NotThere:
    """The type of `NOT_THERE`, the component of a replica that never assigned the name."""

    def __repr__(self) -> str:
        return "<unassigned>"

    def __reduce__(self) -> str:
        return "NOT_THERE"


NOT_THERE: Any = _NotThere()


class EngineReferences:
    """The rules that decide which objects stay on the engine and go to the notebook as handles.

    Attributes:
        register: Gives an id to an object that stays and has none; None while no object may get one.
        holders: The instances that hold device objects, by `id()`, found by a survey of data.
    """

    def __init__(self, objects: EngineObjects) -> None:
        self._objects = objects
        self.register: Callable[[Any], ObjectId] | None = None
        self.holders: dict[int, Any] = {}
        self._parts: dict[int, Any] = {}  # the parts of the notebook's own device objects, by `id()`

    def forget_program(self) -> None:
        """Clear the findings of the previous program."""
        self.holders.clear()
        self._parts.clear()

    def stays(self, obj: Any) -> bool:
        """Return whether an object stays on the engine.

        A device object stays, and so does an instance that holds one. The notebook's own tensors go back to it, with
        their gradients.
        """
        if id(obj) in self.holders:
            return True
        if type(obj) is torch.Tensor and not (obj.requires_grad or obj.grad is not None or vars(obj)):
            # A shortcut for a tensor that holds no other object. Data sets have thousands of them.
            return self._objects.tracker.number_of(obj) is None and id(obj) not in self._parts
        if not is_device_object(obj):
            return False
        if isinstance(obj, torch.Tensor) and obj.grad_fn is not None:
            return True
        if id(obj) not in self._parts:
            if self._objects.tracker.number_of(obj) is None:
                return True
            self._parts.update((id(part), part) for part in _device_parts(obj))
        return is_mirrored(obj)

    def digest_token(self, obj: Any) -> Any:
        """Return the object's identity for the digest if the notebook has a handle of it, or None."""
        identity = self._objects.id_of(obj)
        if identity is None:
            return (type(obj).__name__, obj.values) if isinstance(obj, DistributedValues) else None
        return (identity,)

    def referred(self, keys: Iterable[int]) -> set[int]:
        """Return the `id()`s of tensors that the notebook may have handles of."""
        return self._objects.with_ids(keys)

    def token(self, obj: Any) -> Any:
        """Return the id of an object that stays here."""
        identity = self._objects.id_of(obj)
        if identity is None and self.register is not None and self.stays(obj):
            identity = self.register(obj)
        return identity

    def send_by_value(self, parts: Any) -> None:
        """Note the parts of a notebook's tensor, which are sent by value (the indices and values of a sparse one)."""
        if isinstance(parts, tuple):
            for part in parts:
                self.send_by_value(part)
        elif isinstance(parts, torch.Tensor):
            self._parts[id(parts)] = parts

    def resolve(self, token: Any) -> Any:
        """Return the object to which a token in a snapshot refers."""
        objects, word = self._objects, token[0]
        if word == "refused":
            return Placeholder(*token[1:])
        if word == "components":  # a distributed value that the user made in the notebook: return this replica's part
            kind, components = (Mirrored if token[1] == "Mirrored" else PerReplica), token[2]
            own = {objects.replica: components[objects.replica]} if objects.replica in components else components
            return kind(own, objects.size)
        _, identity, local, kind_name = token
        component = local[objects.replica] if objects.replica in local else objects.owned.get(identity, NOT_THERE)
        if word == "own" or component is NOT_THERE or structure.select(component, objects.replica) is not component:
            return component  # by the last condition it is, or holds, distributed values, as a cell's batch does
        return (Mirrored if kind_name == "Mirrored" else PerReplica)({objects.replica: component}, objects.size)


def _device_parts(obj: Any) -> list[Any]:
    """Return the device objects within another: a tensor's gradient, the parts of a module or an optimizer."""
    found, seen, queue = [], {id(obj)}, [obj]
    for each in queue:  # the loop appends to it
        parts: list[Any] = []
        if isinstance(each, dict):
            parts = list(each.values())
        elif isinstance(each, list | tuple | set):
            parts = list(each)
        elif each is obj or is_device_object(each):
            parts = list(getattr(each, "__dict__", {}).values())
            if isinstance(each, torch.Tensor) and each.is_leaf:
                parts.append(each.grad)
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(part)
                if is_device_object(part):
                    found.append(part)
    return found


class EngineObjects:
    """The objects of a team that this engine, one of its replicas, holds.

    Attributes:
        replica: This engine's replica number.
        tracker: The notebook's objects.
        owned: Objects behind handles, by id.
        gathered: The content of divided objects that this replica has gathered, until they are divided again.
        inherit: Adds the parts of replicas that leave to this replica's, when the team is renamed.
        renamed: The arguments of the latest call of `ObjectsOfTeams.rename`, which other engines may have missed.
        plain: Immutable values and engine objects, by the names that the notebook binds to them.
    """

    def __init__(self, key: TeamKey, user_ns: dict[str, Any], classes: Classes, place: str) -> None:
        self.key = key
        self.replica = 0
        self.references = EngineReferences(self)
        # The notebook's data is larger, and the engines of a machine share it.
        side = Side(user_ns=user_ns, references=self.references, classes=classes, resizable_nbytes=4 << 20)
        self.tracker = Tracker(side, place)
        self.owned: dict[ObjectId, Any] = {}
        self.plain: dict[str, Any] = {}
        self.inherit: Callable[[], None] | None = None
        self.renamed: Renaming | None = None
        self.gathered: list[Any] = []
        self._ids: dict[int, list[ObjectId]] = {}  # each object's ids in the order in which it got them, by `id()`
        self._containers: set[int] = set()  # the plain containers among them, by `id()`

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.key.engines)

    @property
    def owns_containers(self) -> bool:
        """True if objects behind handles include plain containers, for which pickling calls no reducer."""
        return bool(self._containers)

    def containers_within(self, ids: KeysView[int]) -> list[ObjectId]:
        """Return the ids of the plain containers among the objects with these `id()`s."""
        return [self._ids[key][0] for key in self._containers & ids]

    def id_of(self, obj: Any) -> ObjectId | None:
        """Return the id of an object if the notebook has, or may get, a handle of it; otherwise None."""
        found = self._ids.get(id(obj))
        return found[0] if found is not None else None

    def with_ids(self, keys: Iterable[int]) -> set[int]:
        """Return those `id()`s of objects whose objects `id_of` has ids for."""
        return {key for key in keys if key in self._ids} if self._ids else set()

    def own(self, identity: ObjectId, obj: Any, *, by_value: bool = False) -> ObjectId:
        """Keep an object under an id, and return the first id that it got, which identifies it.

        Args:
            by_value: True if the object itself may be sent. The id is then needed only if the replicas do not agree.
        """
        self.owned[identity] = obj
        if by_value:
            return self.id_of(obj) or identity
        known = self._ids.setdefault(id(obj), [])
        if identity not in known:
            known.append(identity)
        if type(obj) in (list, dict, set):
            self._containers.add(id(obj))
        return known[0]

    def release(self, identities: Iterable[ObjectId]) -> None:
        """Release objects to which the notebook holds no more handles."""
        for identity in identities:
            obj = self.owned.pop(identity, NOT_THERE)
            known = self._ids.get(id(obj), [])
            if identity in known:
                known.remove(identity)
                if not known:  # otherwise it is still held under another id
                    del self._ids[id(obj)]
                    self._containers.discard(id(obj))


class _NoReferences:
    """The references of a pickle that copies all objects."""

    def digest_token(self, obj: Any) -> Any:
        """Return None, since every object is copied."""

    def referred(self, keys: Iterable[int]) -> set[int]:
        """Return no `id()`, since every object is copied."""
        return set()

    def token(self, obj: Any) -> Any:
        """Return None, since every object is copied."""

    def send_by_value(self, parts: Any) -> None:
        """Do nothing: a copy has no references."""

    def resolve(self, token: Any) -> Any:
        """Raise KeyError, since nothing was sent by reference."""
        raise KeyError(token)


class ObjectsOfTeams:
    """The objects of every team to which this engine belongs; `place` is its accelerator, or "cpu".

    Attributes:
        incomplete: Whether objects are being copied from another engine, since this one is new, and some are missing.
        serial: The number of the latest snapshot.
    """

    def __init__(self, user_ns: dict[str, Any] | None = None, place: str = "cpu") -> None:
        self.user_ns: dict[str, Any] = {} if user_ns is None else user_ns
        self.place = place
        self._classes = Classes()
        self._classes.new_id = self._new_id
        self._new_classes: collections.Counter[str] = collections.Counter()  # of this program, by name
        self._teams: dict[TeamKey, EngineObjects] = {}
        self.incomplete = False
        self.serial = 0

    @property
    def keys(self) -> tuple[TeamKey, ...]:
        """The keys of the teams."""
        return tuple(self._teams)

    @property
    def renamings(self) -> tuple[Renaming, ...]:
        """The latest change of each team's key."""
        return tuple(objects.renamed for objects in self._teams.values() if objects.renamed is not None)

    def of(self, key: TeamKey) -> EngineObjects:
        """Return a team's objects. A new team starts with none, and an older one of the same strategies is released."""
        found = self._teams.get(key)
        if found is None:
            for stale in [old for old in self._teams if old.whole == key.whole]:
                del self._teams[stale]
            found = self._teams[key] = EngineObjects(key, self.user_ns, self._classes, self.place)
        return found

    def copies(self) -> Tracker:
        """Return a tracker that packs copies of objects of any team, for the notebook or for another engine."""
        return Tracker(
            Side(user_ns=self.user_ns, references=_NoReferences(), classes=self._classes, copying=True), "cpu"
        )

    def program_begins(self, serial: int) -> None:
        """Name classes after the program that is the first to send them, so that all replicas use the same names."""
        self.serial = serial
        self._new_classes.clear()

    def _new_id(self, cls: Any) -> str:
        name = getattr(cls, "__qualname__", cls.__name__)
        self._new_classes[name] += 1
        return f"{self.serial}.{name}.{self._new_classes[name]}"

    def rename(self, old: TeamKey, new: TeamKey | None, inherits: bool = False) -> None:
        """Change the key of a team that continues with fewer or more engines, or drop the team (None).

        With `inherits`, the parts of replicas that leave are added to those that stay, as prepared before.
        """
        objects = self._teams.pop(old, None)
        if objects is None or new is None:
            return
        inherit, objects.inherit = objects.inherit, None
        if inherits and inherit is not None:
            inherit()
        engine = old.engines[objects.replica]
        if engine in new.engines:
            objects.replica = new.engines.index(engine)
            for obj in objects.owned.values():
                _renumber(obj, objects.replica, len(new.engines))
        objects.key, objects.renamed = new, Renaming(old, new, inherits)
        self._teams[new] = objects

    def __len__(self) -> int:
        return sum(len(objects.owned) for objects in self._teams.values())


def _renumber(obj: Any, replica: int, replicas: int) -> None:
    """Renumber the distributed values in an object that hold this replica's component.

    A slice of a batch is left out, because its other slices were dealt to the former replicas.
    """
    for leaf in structure.flatten(obj)[0]:
        if isinstance(leaf, DistributedValues) and len(leaf.values) == 1 and leaf.global_batch_size is None:
            leaf._components = {replica: leaf.values[0]}
            leaf._num_replicas, leaf._kinds = replicas, None
