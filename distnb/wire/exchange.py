"""The messages about names and objects: snapshots to the engines, and results to the notebook.

They are named tuples because every call sends some of them, and a pickled dataclass also contains its field names.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from distnb.objects.modes.environment import Environment
from distnb.objects.packing import Packed
from distnb.options import ReduceOp, StrategySpec
from distnb.topology import unpickle_team
from distnb.values import DistributedValues
from distnb.wire.codec import give_codes
from distnb.wire.messages import CallFunction, ObjectId, Reply

__all__ = [
    "RETURNED",
    "Described",
    "HeldArgument",
    "Leaf",
    "Mark",
    "NamedArgument",
    "Reloads",
    "Request",
    "Result",
    "Settlement",
    "Snapshot",
    "Summary",
    "TeamKey",
    "follow",
    "former",
    "is_bare",
    "leaf_name",
    "name_of_given",
]


class TeamKey(NamedTuple):
    """The identity of a group of engines whose objects belong together.

    Attributes:
        engines: The engines, in replica order.
        formed: The number of times that the notebook has formed or changed a group.
        whole: The engines that the group's strategies have if none has ended. Two strategies may run on the same
            engines for a while, because one of them has lost others.
    """

    engines: tuple[int, ...]
    formed: int
    whole: tuple[int, ...]


def former(name: str, serial: int) -> str:
    """Return the new name of a value whose old name was reassigned. Engine objects may still hold the value."""
    return f"{name}#{serial}"


RETURNED = "return"
"""The name of a call's result on the engines. No variable can have it."""


def leaf_name(result_name: str, index: int) -> str:
    """Return the name of a leaf of a result. An operation on a handle has at most one leaf."""
    return result_name if result_name[0] == "@" else f"{result_name}.{index}"


def name_of_given(serial: int) -> str:
    """Return the name of the result of an operation on a handle. Both sides use it for data that is returned."""
    return f"@{serial}"


class NamedArgument(NamedTuple):
    """An argument of a call that represents the value of a name."""

    name: str


class HeldArgument(NamedTuple):
    """An argument of a call that represents a distributed value, by its token in a pack."""

    token: Any


_BARE = frozenset({type(None), bool, int, float, str, NamedArgument, ReduceOp})
_FUNCTIONS = frozenset({types.FunctionType, types.BuiltinFunctionType})


def is_bare(arguments: Any) -> bool:
    """Return whether a call's arguments are only names and values of the simplest types, which any pickler can send."""
    kind = type(arguments)
    if kind is tuple or kind is list:
        return all(map(is_bare, arguments))
    if kind is dict:
        return all(type(name) is str and is_bare(value) for name, value in arguments.items())
    if kind is HeldArgument:
        return arguments.token[0] in ("own", "argument") and not arguments.token[2]
    if kind in _FUNCTIONS:
        return str(arguments.__module__).startswith(("distnb.", "_operator")) and "<" not in arguments.__qualname__
    return kind in _BARE


def follow(obj: Any, path: Iterable[tuple[str, Any]]) -> Any:
    """Return the object at the end of a path of attributes `("a", name)` and items `("i", key)`."""
    if isinstance(obj, DistributedValues) and len(obj.values) == 1:
        obj = obj.values[0]
    for step, name in path:
        obj = getattr(obj, name) if step == "a" else obj[name]
    return obj


class Reloads(NamedTuple):
    """The reloads of a module in the notebook since it was imported there.

    Attributes:
        times: The number of reloads.
        in_place: Whether the last reload also changed functions and classes that others hold, as %autoreload does.
        text_before: The text of the module's file when the notebook found the module, if the last reload changed only
            the definitions whose text had changed; else "".
    """

    times: int = 0
    in_place: bool = False
    text_before: str = ""


class Snapshot(NamedTuple):
    """The part of the notebook's namespace that a program needs.

    Attributes:
        team: The engines of the group that the snapshot is sent to.
        serial: The number of the snapshot, which is part of the ids of objects that the program creates.
        names: The names that the program reads; None if the engines' namespace may stay unchanged.
        staying: The notebook's other names, whose bindings stay.
        imports: The modules by the names that are bound to them.
        sections: The names whose values are compared after the program, whether they are bound or not.
        most_nbytes: The size above which data that the program creates stays on the engines.
        pack: The values of the sections that the engines lack.
        plain: The immutable values and handles, by name, that the engines lack.
        arguments: The arguments of a call, with `NamedArgument`s in them; packed unless they are bare.
        fresh: Whether the snapshot has everything that is needed, since earlier snapshots may not have arrived.
        renamed: The new names of values that were sent before, by their old names.
        forget: The names whose values may differ between the two sides.
        unlike_parts: The numbers of parts of packs whose objects can no longer be identified by their numbers: the
            numbers differ between replicas, or the notebook has none of the objects.
        adopt: The objects that become engine objects, by id. Each is identified by the name of a value; or, for each
            replica, by the number that the replica assigned to the object or by the id that the object has there.
        release: The ids that the notebook no longer holds.
        handles: The engine objects that are described again after the program.
        environment: The parts of the environment that changed.
        sources: The texts and names of cells ("Cell In[3]", or ""), by file name, for tracebacks.
        modules: The submodules to import, and the reloads of local modules, by name.
        awaited: The submodules that the program's text imports and the notebook does not have.
    """

    team: TeamKey
    serial: int
    names: tuple[str, ...] | None = None
    staying: tuple[str, ...] = ()
    imports: Mapping[str, str] = {}
    sections: tuple[str, ...] = ()
    most_nbytes: int = 0
    pack: Packed | None = None
    plain: Packed | None = None
    arguments: Packed | tuple[tuple[Any, ...], dict[str, Any]] | None = None
    fresh: bool = False
    renamed: Mapping[str, str] = {}
    forget: tuple[str, ...] = ()
    unlike_parts: tuple[int, ...] = ()
    adopt: Mapping[ObjectId, str | Mapping[int, int | ObjectId]] = {}
    release: tuple[ObjectId, ...] = ()
    handles: tuple[ObjectId, ...] = ()
    environment: Environment | None = None
    sources: Mapping[str, tuple[str, str]] = {}
    modules: Mapping[str, Reloads] = {}
    awaited: tuple[str, ...] = ()

    @property
    def binds_nothing(self) -> bool:
        """True if the engines have all values that a call needs, under the names that it reads."""
        return self.names is None and self.pack is None and self.plain is None


class Summary(NamedTuple):
    """A summary of an engine object, which the notebook shows without asking again.

    Attributes:
        type: The qualified name of the object's class, without the module for builtins.
        text: The object's own short description; None if it is fetched when the handle is shown.
        shape, dtype, device: The properties of a tensor or an array, else "".
        attributes: The names that `dir` returns, for completion.
        iterates: Whether the object is an iterator.
        number: The element of a tensor without dimensions in host memory, which costs neither waiting nor memory.
        graph: Whether the object is a tensor that autograd computed.
        hashing: The way in which the object is hashed: by its identity, by its value, or not at all.
    """

    type: str
    text: str | None
    shape: str = ""
    dtype: str = ""
    device: str = ""
    attributes: tuple[str, ...] = ()
    iterates: bool = False
    number: float | int | complex | None = None
    graph: bool = False
    hashing: Literal["identity", "value", "none"] = "identity"


class Described(NamedTuple):
    """The description of a name's value, or of a result, on one replica.

    Attributes:
        kind: The way in which the value reaches the notebook:
            "plain": an immutable value, in `value` or in `Result.plain`.
            "module": a module, whose name is `value`. The id is used if the notebook cannot import it.
            "sent": data or code in the pack. `value` is its number if the notebook has it. The id is used if the
            replicas differ.
            "tracked": an object of the notebook; `value` is its number.
            "object": an object that stays on the engine.
        digest: The digest of the content, or None if it is unknown.
        value: A scalar plain value, a module's name, or an object's number, depending on `kind`; "method" for a method.
        identity: The object's id on every replica.
        summary: The summary that the notebook shows, or None.
        mirrored: Whether the object was created in a scope, and so is kept equal on all replicas.
        wrapped: Whether the object is a distributed value that holds this replica's component.
        reads: The global names that the object's code reads.
        holds: The notebook's names of objects within it, and the ids of engine objects within it.
        together: Whether the replicas hold parts of a whole value, which they read together.
        divided: Whether these parts are shards of a module, an optimizer or a tensor.
        why: The reason why the object stays on the engine although it is not a device object; "" for a device object
            and for data.
        nbytes: The size in bytes of data that is too large to be sent; else 0.
    """

    kind: Literal["plain", "sent", "module", "tracked", "object"]
    digest: bytes | None = None
    value: Any = None
    identity: ObjectId | None = None
    summary: Summary | None = None
    mirrored: bool = False
    wrapped: bool = False
    reads: tuple[str, ...] = ()
    holds: tuple[str | ObjectId, ...] = ()
    together: bool = False
    divided: bool = False
    why: str = ""
    nbytes: int = 0


class Leaf:
    """A placeholder in the structure of a result for one described leaf.

    The class is neither a tuple nor a dataclass: those are structures, so their fields would be the leaves.
    """

    __slots__ = ("described",)

    def __init__(self, described: Described) -> None:
        self.described = described

    def __reduce__(self) -> Any:
        return Leaf, (self.described,)


class Result(NamedTuple):
    """The effects of a program on one replica.

    Attributes:
        serial: The serial of the program's snapshot.
        names: The descriptions of the names that the program assigned.
        deleted: The names that the program deleted.
        changed: The digests of values that the program changed in place, by the names of the snapshot; None for an
            unknown digest.
        pack: The changed values, except those that now hold too many device objects, and the assigned values of kind
            "sent". It is bare if another replica sends the same pack, or if the notebook does not use it.
        plain: The plain values, except scalars, that the program assigned or returned, by name.
        fresh: The descriptions of engine objects that the pack refers to and that have no handle yet.
        handles: New descriptions of the engine objects that the program read.
        imported: The awaited submodules that are now imported.
        environment: The parts of the environment that the program changed; None if it changed none.
        result: The structure of a call's result, with `Leaf`s.
        result_name: The name under which the engines keep the result.
        sources: The texts of an earlier notebook's cells, by file name, for tracebacks.
    """

    serial: int
    names: Mapping[str, Described] = {}
    deleted: tuple[str, ...] = ()
    changed: Mapping[str, bytes | None] = {}
    pack: Packed | None = None
    plain: Packed | None = None
    fresh: Mapping[ObjectId, Described] = {}
    handles: Mapping[ObjectId, Described] = {}
    imported: tuple[str, ...] = ()
    environment: Environment | None = None
    result: Any = None
    result_name: str = RETURNED
    sources: Mapping[str, str] = {}

    @property
    def data_given(self) -> dict[str, Described]:
        """The data that an operation on a handle returned, by the name that both sides use for it."""
        if self.pack is None or self.result_name not in self.pack.names:
            return {}
        return {self.result_name: self.result[0].described}

    @property
    def only_returned(self) -> bool:
        """True if the call had no effect except its result."""
        effects = self.names, self.deleted, self.changed, self.fresh, self.handles, self.imported
        return not any(effects) and self.pack is None and self.environment is None


class Request(NamedTuple):
    """An operation on engine objects, requested by a handle.

    Attributes:
        snapshot: The snapshot of the operation, with its arguments.
        path: The attributes `("a", name)` and items `("i", key)` to follow from the object.
        answers: The replicas that answer; None for all.
        targets: The ids of the objects, for operations on several objects.
        pack: The objects that a survivor exported and a new engine imports.
        left_out: The ids of the objects that are not exported.
        random: The survivor's random states, which a new engine imports.
    """

    snapshot: Snapshot
    path: tuple[tuple[str, Any], ...] = ()
    answers: tuple[int, ...] | None = None
    targets: tuple[ObjectId, ...] = ()
    pack: Packed | None = None
    left_out: tuple[ObjectId, ...] = ()
    random: bytes = b""


class Settlement(NamedTuple):
    """The request to prepare a group of engines for replicas that leave it, or for new ones.

    Attributes:
        team: The engines before the change.
        leaving: The replicas that leave.
        strategies: The strategies that run on these engines.
    """

    team: TeamKey
    leaving: tuple[int, ...]
    strategies: tuple[StrategySpec, ...]


@dataclass
class Mark:
    """The state of the engine's namespace when a program began."""

    before: dict[str, Any]
    snapshot: Snapshot
    environment: Environment


give_codes(
    0,
    *(CallFunction, unpickle_team, StrategySpec, Snapshot, NamedArgument, HeldArgument, ReduceOp),
    *(Reply, Result, Leaf, Described),
)
