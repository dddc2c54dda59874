"""What notebook and engines tell each other of names and objects: deliveries one way, effects the other."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from distnb.values import DistributedValues
from distnb.wire.codec import Parcel
from distnb.wire.environment import Environment
from distnb.wire.immutables import SCALARS
from distnb.wire.messages import ObjectId

__all__ = [
    "Confirmation",
    "Delivery",
    "Described",
    "Effects",
    "NO_SCALAR",
    "Leaf",
    "Mark",
    "Reloads",
    "Repeat",
    "Request",
    "Returned",
    "SpaceKey",
    "Summary",
    "follow",
    "pack_indexes",
    "unpack_indexes",
]

SpaceKey = tuple[tuple[int, ...], int]
"""The engines whose objects belong together, and how often that group was made anew."""


def pack_indexes(indexes: Iterable[int]) -> bytes:
    """Memo indexes as bytes."""
    return array("I", indexes).tobytes()


def unpack_indexes(data: bytes) -> array[int]:
    """What `pack_indexes` was given."""
    indexes = array("I")
    indexes.frombytes(data)
    return indexes


def follow(obj: Any, path: Iterable[tuple[str, Any]]) -> Any:
    """What is found from an object by attributes `("a", name)` and items `("i", key)`."""
    if isinstance(obj, DistributedValues) and len(obj.values) == 1:
        obj = obj.values[0]
    for step, name in path:
        obj = getattr(obj, name) if step == "a" else obj[name]
    return obj


@dataclass(frozen=True)
class Confirmation:
    """The notebook took in the effects of one program.

    Attributes:
        serial: Of the delivery that the program came with.
        nodes: Memo indexes of objects that the notebook now holds as plain values.
        names: Names whose engine objects it holds by handles.
    """

    serial: int
    nodes: bytes = b""
    names: tuple[str, ...] = ()


class Reloads(NamedTuple):
    """What became of a module in the notebook since it was imported there.

    Attributes:
        times: How often it was reloaded.
        in_place: Whether functions and classes that others hold changed with it the last time, as by %autoreload.
    """

    times: int = 0
    in_place: bool = False


@dataclass(frozen=True)
class Delivery:
    """What a program needs of the notebook's namespace.

    Attributes:
        space: Whose twins the ids are.
        serial: Number of this delivery; ids of the objects in it carry it.
        blob: First a dict of names to bind; for a call then `(args, kwargs)`; then `updates` triples
            (id, kind, state) that bring objects already there up to date.
        nodes: Memo indexes of the objects in the blob that are twins from now on.
        delete: Names that are gone from the notebook, or stale and not read.
        confirmed: Effects of earlier programs that the notebook took in.
        rejected: Serials of those that it did not: what they bound is undone.
        renamed: Objects of the notebook that are behind handles from now on: their ids, old and new.
        release: Ids that the notebook no longer holds.
        watch: Objects to compare after the program: those that it may change.
        handles: Engine objects that it reads.
        environment: The parts that changed.
        sources: Texts and names of cells ("Cell In[3]", or ""), by file name, for tracebacks.
        modules: Submodules to be imported, and what became of local modules since, by name.
        keep: Of a call whose arguments are functions and plain values: the place where they are kept for a `Repeat`.
    """

    space: SpaceKey
    serial: int
    blob: Parcel | None = None
    updates: int = 0
    nodes: bytes = b""
    delete: tuple[str, ...] = ()
    confirmed: tuple[Confirmation, ...] = ()
    rejected: tuple[int, ...] = ()
    renamed: dict[ObjectId, ObjectId] = field(default_factory=dict)
    release: tuple[ObjectId, ...] = ()
    watch: tuple[ObjectId, ...] = ()
    handles: tuple[ObjectId, ...] = ()
    environment: Environment | None = None
    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, Reloads] = field(default_factory=dict)
    keep: int | None = None


class Repeat(NamedTuple):
    """The delivery of a call that brings nothing: it is an earlier one again, and nothing that it reads has changed.

    Attributes:
        space, serial: As of a `Delivery`.
        place: Where that call's arguments are kept.
        of: That call's serial. A replica that was stopped before it opened that delivery still has another's there.
        calls: How many calls in a row it stands for: their programs, and their serials, are numbered on from the first.
    """

    space: SpaceKey
    serial: int
    place: int
    of: int
    calls: int = 1

    @property
    def watch(self) -> tuple[ObjectId, ...]:
        """Nothing is compared."""
        return ()

    @property
    def handles(self) -> tuple[ObjectId, ...]:
        """No engine objects are read."""
        return ()


@dataclass(frozen=True)
class Summary:
    """How an engine object looks, for the notebook to show without asking again.

    Attributes:
        type: Qualified name of its class, without the module of builtins.
        text: Its own short description; None if it is to be asked for when it is shown.
        shape, dtype, device: Of tensors and arrays, else "".
        attributes: What `dir` gives, for completion.
        doc, signature: For `?`.
        kind: "tensor", "callable", or "".
        iterates: Whether it is an iterator.
    """

    type: str
    text: str | None
    shape: str = ""
    dtype: str = ""
    device: str = ""
    attributes: tuple[str, ...] = ()
    doc: str = ""
    signature: str = ""
    kind: str = ""
    iterates: bool = False


@dataclass(frozen=True)
class Described:
    """What a name, or a result, is on one replica.

    Attributes:
        kind: "plain": an immutable value, packed in `value`; "code": a function or class, in the effects' blob;
            "module": `value` is its name; "known": an object with the twin `identity`; "object": a new one.
        digest: Of its content; None where it cannot be told.
        value: The packed plain value, or the module's name.
        identity: The object's id on every replica.
        mirrored: It was made in a scope, so it is kept equal on all replicas.
        wrapped: It is a distributed value that holds this replica's component.
        reads: Global names that its code reads; None if unknown.
        holds: Ids of objects with twins within it.
        together: The replicas hold parts; what it is as a whole, they read together.
    """

    kind: Literal["plain", "code", "module", "known", "object"]
    digest: bytes | None = None
    value: Any = None
    identity: ObjectId | None = None
    summary: Summary | None = None
    mirrored: bool = False
    wrapped: bool = False
    reads: tuple[str, ...] | None = ()
    holds: tuple[ObjectId, ...] = ()
    together: bool = False


class Leaf:
    """Stands in the structure of a result for one described leaf.

    No dataclass: those are structures, whose fields would be leaves in its place.
    """

    __slots__ = ("described",)

    def __init__(self, described: Described) -> None:
        self.described = described


@dataclass(frozen=True)
class Effects:
    """What a program did on one replica.

    Attributes:
        serial: Of the delivery that it came with.
        names: What each name that it assigned now is.
        deleted: Names that it deleted.
        blob: First a dict of functions and classes by name, then `updates` triples (id, kind, state).
        changed: Digest of the new state of each of the notebook's objects in the blob.
        fresh: Engine objects that the blob refers to and that have no handle yet.
        handles: Engine objects that it read, described anew.
        environment: The parts that it changed; None if none.
        result: Of a call: its structure with `Leaf`s.
    """

    serial: int
    names: dict[str, Described] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    blob: Parcel | None = None
    updates: int = 0
    changed: dict[ObjectId, bytes] = field(default_factory=dict)
    fresh: dict[ObjectId, Described] = field(default_factory=dict)
    handles: dict[ObjectId, Described] = field(default_factory=dict)
    environment: Environment | None = None
    result: Any = None

    @property
    def only_result(self) -> bool:
        """Whether the program did nothing that the notebook must take in, but give a result."""
        return not (
            self.names
            or self.deleted
            or self.blob is not None
            or self.changed
            or self.fresh
            or self.handles
            or self.environment is not None
        )

    @property
    def only_plain_result(self) -> bool:
        """Whether, besides, the engine keeps nothing of it."""
        return self.only_result and type(self.result) is Leaf and self.result.described.kind == "plain"

    @property
    def scalar(self) -> Any:
        """The scalar that is all that there is to take in; else NO_SCALAR."""
        if self.only_plain_result:
            value = self.result.described.value
            return value if type(value) in SCALARS else NO_SCALAR
        return NO_SCALAR


NO_SCALAR: Any = object()


class Returned:
    """The effects of a call that did nothing but return a scalar, at a tenth of the cost.

    Attributes:
        serial: Of the delivery that it came with.
        scalar: What it returned.
    """

    __slots__ = ("scalar", "serial")

    def __init__(self, serial: int, scalar: Any) -> None:
        self.serial = serial
        self.scalar = scalar

    def effects(self) -> Effects:
        """The same in full."""
        return Effects(self.serial, result=Leaf(Described("plain", None, self.scalar)))


@dataclass(frozen=True)
class Request:
    """An operation on engine objects, asked by a handle; its arguments are the call part of the delivery.

    Attributes:
        path: Attributes `("a", name)` and items `("i", key)` to follow from the object.
        answers: Replicas that answer; None for all.
        targets: Objects, for operations on several.
        blob: What a survivor exported, for a replacement to import.
    """

    delivery: Delivery
    path: tuple[tuple[str, Any], ...] = ()
    answers: tuple[int, ...] | None = None
    targets: tuple[ObjectId, ...] = ()
    blob: Parcel | None = None


@dataclass
class Mark:
    """Where the engine's namespace stood when a program began."""

    before: dict[str, Any]
    delivery: Delivery | Repeat
    environment: Environment
