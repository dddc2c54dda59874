"""The messages to the notebook about names and objects: the effects of a program, with a description of each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from distnb.objects.modes.environment import Environment
from distnb.objects.packing import Packed
from distnb.wire.codec import give_codes
from distnb.wire.messages import ObjectId, Reply

__all__ = [
    "METHOD",
    "RETURNED",
    "UNKNOWN",
    "WRAPPED",
    "Described",
    "DescribedObject",
    "Leaf",
    "ModuleValue",
    "PlainValue",
    "Result",
    "SentValue",
    "Sharing",
    "Summary",
    "TrackedValue",
    "as_object",
    "leaf_name",
    "name_of_given",
]

RETURNED = "return"
"""The name of a call's result on the engines. No variable can have it."""

METHOD = "method"
"""The result of reading an attribute that is a method, which a handle calls by its path."""


def leaf_name(result_name: str, index: int) -> str:
    """Return the name of a leaf of a result. An operation on a handle has at most one leaf."""
    return result_name if result_name[0] == "@" else f"{result_name}.{index}"


def name_of_given(serial: int) -> str:
    """Return the name of the result of an operation on a handle. Both sides use it for data that is returned."""
    return f"@{serial}"


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


UNKNOWN = Summary(type="object", text=None)
"""The summary of an object that was not described."""


class Sharing(NamedTuple):
    """The way in which an object belongs to several replicas. By default it is one replica's own.

    Attributes:
        mirrored: Whether the object was created in a scope, and so is kept equal on all replicas.
        wrapped: Whether the object is a distributed value that holds this replica's component.
        together: Whether the replicas hold parts of a whole value, which they read together.
        divided: Whether these parts are shards of a module, an optimizer or a tensor.
    """

    mirrored: bool = False
    wrapped: bool = False
    together: bool = False
    divided: bool = False


_OWN = Sharing()
WRAPPED = Sharing(wrapped=True)
"""The sharing of a distributed value that holds this replica's component."""


class DescribedObject(NamedTuple):
    """An object that stays on the engine.

    Attributes:
        identity: The object's id on every replica.
        digest: The digest of the content, or None if it is unknown.
        summary: The summary that the notebook shows.
        sharing: The way in which it belongs to several replicas.
        reads: The global names that the object's code reads.
        holds: The notebook's names of objects within it, and the ids of engine objects within it.
        why: The reason why the object stays on the engine although it is not a device object; "" for a device object
            and for data.
        nbytes: The size in bytes of data that is too large to be sent; else 0.
    """

    identity: ObjectId
    digest: bytes | None = None
    summary: Summary = UNKNOWN
    sharing: Sharing = _OWN
    reads: tuple[str, ...] = ()
    holds: tuple[str | ObjectId, ...] = ()
    why: str = ""
    nbytes: int = 0


class SentValue(NamedTuple):
    """Data or code in the result's pack.

    Attributes:
        kept: Its description as an object that stays on the engine, if the replicas differ.
        number: Its number if the notebook has it; else None.
    """

    kept: DescribedObject
    number: int | None = None


class PlainValue(NamedTuple):
    """An immutable value: a scalar, or a value in `Result.plain` if `packed`."""

    value: Any = None
    packed: bool = False


class ModuleValue(NamedTuple):
    """A module. The id is used if the notebook cannot import it."""

    name: str
    identity: ObjectId


class TrackedValue(NamedTuple):
    """An object of the notebook, by its number."""

    number: int


Described: TypeAlias = DescribedObject | SentValue | PlainValue | ModuleValue | TrackedValue
"""The description of a name's value, or of a result, on one replica, by the way in which it reaches the notebook."""


def as_object(described: Described) -> DescribedObject | None:
    """Describe a value that has an id as an object that stays on the engine. Return None for other values."""
    if isinstance(described, DescribedObject):
        return described
    if isinstance(described, SentValue):
        return described.kept
    if isinstance(described, ModuleValue):
        return DescribedObject(identity=described.identity, digest=b"a module", summary=Summary("module", None))
    return None


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
        pack: The changed values, except those that now hold too many device objects, and the values that are
            described as sent. It is bare if another replica sends the same pack, or if the notebook does not use it.
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
    fresh: Mapping[ObjectId, DescribedObject] = {}
    handles: Mapping[ObjectId, DescribedObject] = {}
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


give_codes(32, Reply, Result, Leaf, DescribedObject, SentValue, PlainValue, ModuleValue, TrackedValue, Summary, Sharing)
