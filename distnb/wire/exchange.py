"""The messages about names and objects: snapshots to the engines, results to the notebook.

Named tuples: every call brings some of them, and a dataclass is pickled with the names of its fields.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from distnb.objects.modes import Environment
from distnb.objects.packing import Packed
from distnb.options import ReduceOp
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
    "Snapshot",
    "Summary",
    "TeamKey",
    "follow",
    "former",
    "is_bare",
    "leaf_name",
    "name_of_given",
]

TeamKey = tuple[tuple[int, ...], int]
"""The engines whose objects belong together, and how often that group was rebuilt."""


def former(name: str, serial: int) -> str:
    """Return the name of a value whose own name was reassigned while engine objects may still hold the value."""
    return f"{name}#{serial}"


RETURNED = "return"
"""The name of a call's result on the engines. No variable can have it."""


def leaf_name(result_name: str, index: int) -> str:
    """Return the name of a leaf of a result. An operation on a handle has at most one leaf."""
    return result_name if result_name[0] == "@" else f"{result_name}.{index}"


def name_of_given(serial: int) -> str:
    """Return the name of the result of an operation on a handle: both sides know data by it."""
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
    """Return whether arguments of a call are names and the simplest values only, which any pickler can send."""
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
        times: How often it was reloaded.
        in_place: Whether functions and classes that others hold changed with it the last time, as by %autoreload.
    """

    times: int = 0
    in_place: bool = False


class Snapshot(NamedTuple):
    """The part of the notebook's namespace that a program needs.

    Attributes:
        team: The engines whose objects it is about.
        serial: Its number; objects that the program makes are called by it.
        names: Those that the program reads; None where the namespace may stay as it is.
        staying: Other names of the notebook's, which stay bound to what they are bound to.
        imports: Modules by the names that are bound to them.
        sections: Names whose values are compared after the program, whether they are bound or not.
        most_nbytes: Larger data that it makes stays on the engines.
        pack: What the engines lack of these values.
        plain: Immutable values and handles, by name, that the engines lack.
        arguments: Of a call, with `NamedArgument`s in them; packed unless they are bare.
        fresh: What was sent before is not certain to have arrived: all that is needed is here.
        renamed: What was sent under a name is known by another from now on.
        forget: Names of which the two sides may have something else.
        unlike_parts: Parts of packs, by number, whose objects are not known by their numbers any more: they have others
            on other replicas, or the notebook has none of them.
        adopt: Objects that are engine objects from now on, by id: given by the name of a value, or for each replica by
            the number that it has given it, or by the id that it has there already.
        release: Ids that the notebook no longer holds.
        handles: Engine objects that are described again after the program.
        environment: The parts that changed.
        sources: Texts and names of cells ("Cell In[3]", or ""), by file name, for tracebacks.
        modules: Submodules to be imported, and what became of local modules since, by name.
        awaited: Submodules that the program's text imports, and that the notebook does not have.
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
        """True if the engines have all that a call needs, under the names that it reads."""
        return self.names is None and self.pack is None and self.plain is None


class Summary(NamedTuple):
    """A summary of an engine object, which the notebook shows without asking again.

    Attributes:
        type: Qualified name of its class, without the module of builtins.
        text: Its own short description; None if it is to be asked for when it is shown.
        shape, dtype, device: Of tensors and arrays, else "".
        attributes: What `dir` gives, for completion.
        iterates: Whether it is an iterator.
        number: The element of a tensor without dimensions in host memory, which takes no waiting and no room.
        graph: Whether it is a tensor that autograd computed.
        hashing: Whether it is hashed by its identity, by its value, or not at all.
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
        kind: "plain": an immutable value, among `Result.plain` if not here. "module": `value` is its name; the id
            serves where the notebook cannot import it. "sent": data or code, in the pack; `value` is its number if the
            notebook has it, and the id serves where the replicas do not agree. "tracked": an object of the notebook's,
            `value` is its number. "object": one that lives here.
        digest: The digest of the content, or None if it is unknown.
        value: The plain value, if it is a scalar.
        identity: The object's id on every replica.
        mirrored: It was made in a scope, so it is kept equal on all replicas.
        wrapped: It is a distributed value that holds this replica's component.
        reads: Global names that its code reads.
        holds: Names of the notebook's whose objects are within it, and ids of engine objects that are.
        together: The replicas hold parts; what it is as a whole, they read together.
        why: Why it lives here though it is no device object; "" for a device object, and for data.
        nbytes: The size of data that is too large to be sent; else 0.
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
    why: str = ""
    nbytes: int = 0


class Leaf:
    """The place of one described leaf in the structure of a result.

    No tuple and no dataclass: those are structures, whose fields would be leaves in its place.
    """

    __slots__ = ("described",)

    def __init__(self, described: Described) -> None:
        self.described = described

    def __reduce__(self) -> Any:
        return Leaf, (self.described,)


class Result(NamedTuple):
    """The effects of a program on one replica.

    Attributes:
        serial: Of the snapshot that it came with.
        names: What each name that it assigned now is.
        deleted: Names that it deleted.
        changed: Digests of values that it changed in place, by the names of the snapshot; None if one is unknown.
        pack: These values, and what it assigned of kind "sent". Not those that hold too many device objects now. Bare,
            where another replica sends the same, or the notebook has no use for it.
        plain: The plain values that it assigned or returned and that are no scalars, by name.
        fresh: Engine objects that the pack refers to and that have no handle yet.
        handles: New descriptions of the engine objects that it read.
        imported: Those of the awaited submodules that are there now.
        environment: The parts that it changed; None if none.
        result: Of a call: its structure with `Leaf`s.
        result_name: What it is kept under.
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

    @property
    def data_given(self) -> dict[str, Described]:
        """The data that an operation on a handle gave, by the name that both sides know it under."""
        if self.pack is None or self.result_name not in self.pack.names:
            return {}
        return {self.result_name: self.result[0].described}

    @property
    def only_returned(self) -> bool:
        """True if the call had no effect except its result."""
        told = self.names, self.deleted, self.changed, self.fresh, self.handles, self.imported
        return not any(told) and self.pack is None and self.environment is None


class Request(NamedTuple):
    """An operation on engine objects, asked by a handle; its arguments come with the snapshot.

    Attributes:
        path: Attributes `("a", name)` and items `("i", key)` to follow from the object.
        answers: Replicas that answer; None for all.
        targets: Objects, for operations on several.
        pack: What a survivor exported, for a replacement to import.
    """

    snapshot: Snapshot
    path: tuple[tuple[str, Any], ...] = ()
    answers: tuple[int, ...] | None = None
    targets: tuple[ObjectId, ...] = ()
    pack: Packed | None = None


@dataclass
class Mark:
    """The state of the engine's namespace when a program began."""

    before: dict[str, Any]
    snapshot: Snapshot
    environment: Environment


give_codes(0, CallFunction, Snapshot, NamedArgument, HeldArgument, Reply, Result, Leaf, Described)
