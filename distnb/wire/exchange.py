"""The messages to the engines about names and objects. `described_values` has the answers.

They are named tuples because every call sends some of them, and a pickled dataclass also contains its field names.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from distnb.objects.modes.environment import Environment
from distnb.objects.packing import Packed
from distnb.options import ReduceOp, StrategySpec
from distnb.topology import unpickle_team
from distnb.values import DistributedValues
from distnb.wire.codec import give_codes
from distnb.wire.messages import CallFunction, ObjectId

__all__ = [
    "Bindings",
    "HeldArgument",
    "Inquiry",
    "NamedArgument",
    "Reloads",
    "Renaming",
    "Request",
    "Settlement",
    "Snapshot",
    "Surroundings",
    "TeamKey",
    "Upkeep",
    "argument_name",
    "follow",
    "former",
    "is_bare",
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


class Renaming(NamedTuple):
    """The change of a team's key, since it has become smaller or larger.

    Attributes:
        old: The key before.
        new: The key afterwards.
        inherits: Whether replicas that stay add the parts of replicas that leave to their own (see `Settlement`).
    """

    old: TeamKey
    new: TeamKey
    inherits: bool


def former(name: str, serial: int) -> str:
    """Return the new name of a value whose old name was reassigned. Engine objects may still hold the value."""
    return f"{name}#{serial}"


class NamedArgument(NamedTuple):
    """An argument of a call that represents the value of a name."""

    name: str


def argument_name(value: Any) -> str:
    """Return the name that is sent for an argument without a name."""
    return f"@{id(value):x}"


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


class Upkeep(NamedTuple):
    """The changes of the values that the engines keep. They are applied before a program's own values are opened.

    They may arrive twice, since the notebook sends them again if another replica did not receive them.

    Attributes:
        fresh: Whether the engines forget all values, since earlier snapshots may not have arrived.
        renamed: The new names of values that were sent before, by their old names.
        forget: The names whose values may differ between the two sides.
        unlike_parts: The numbers of parts of packs whose objects can no longer be identified by their numbers: the
            numbers differ between replicas, or the notebook has none of the objects.
        adopt: The objects that become engine objects, by id. Each is identified by the name of a value; or, for each
            replica, by the number that the replica assigned to the object or by the id that the object has there.
        release: The ids that the notebook no longer holds.
    """

    fresh: bool = False
    renamed: Mapping[str, str] = {}
    forget: tuple[str, ...] = ()
    unlike_parts: tuple[int, ...] = ()
    adopt: Mapping[ObjectId, str | Mapping[int, int | ObjectId]] = {}
    release: tuple[ObjectId, ...] = ()


class Bindings(NamedTuple):
    """The names of the engines' namespace while a program runs. All other names are removed.

    Attributes:
        names: The names that the program reads.
        staying: The notebook's other names, whose bindings stay.
        imports: The modules by the names that are bound to them.
        plain: The immutable values and handles, by name, that the engines lack.
    """

    names: tuple[str, ...]
    staying: tuple[str, ...] = ()
    imports: Mapping[str, str] = {}
    plain: Packed | None = None


class Surroundings(NamedTuple):
    """The changes of what surrounds a program's code.

    Attributes:
        environment: The modes that changed.
        sources: The texts and names of cells ("Cell In[3]", or ""), by file name, for tracebacks.
        modules: The submodules to import, and the reloads of local modules, by name.
    """

    environment: Environment | None = None
    sources: Mapping[str, tuple[str, str]] = {}
    modules: Mapping[str, Reloads] = {}


class Inquiry(NamedTuple):
    """The effects that the engines report after a program.

    Attributes:
        most_nbytes: The size above which data that the program creates stays on the engines.
        sections: The names whose values are compared, whether they are bound or not.
        handles: The engine objects that are described again.
        awaited: The submodules that the program's text imports and the notebook does not have.
    """

    most_nbytes: int = 0
    sections: tuple[str, ...] = ()
    handles: tuple[ObjectId, ...] = ()
    awaited: tuple[str, ...] = ()


class Snapshot(NamedTuple):
    """The part of the notebook's namespace that a program needs.

    A part is None if the engines have it already, as in most calls of a loop.

    Attributes:
        team: The engines of the group that the snapshot is sent to.
        serial: The number of the snapshot, which is part of the ids of objects that the program creates.
        inquiry: The effects to report.
        upkeep: The changes of the values that the engines keep.
        surroundings: The changes of what surrounds the program's code.
        bindings: The names to bind; None if the engines' namespace may stay unchanged.
        pack: The values of the inquiry's sections that the engines lack.
        arguments: The arguments of a call, with `NamedArgument`s in them; packed unless they are bare.
    """

    team: TeamKey
    serial: int
    inquiry: Inquiry
    upkeep: Upkeep | None = None
    surroundings: Surroundings | None = None
    bindings: Bindings | None = None
    pack: Packed | None = None
    arguments: Packed | tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def binds_nothing(self) -> bool:
        """True if the engines have all values that a call needs, under the names that it reads."""
        return self.bindings is None and self.pack is None

    @property
    def sends_nothing(self) -> bool:
        """True if the engines have all that it needs. It may release objects, and bind names again."""
        upkeep, bindings = self.upkeep, self.bindings
        releases = upkeep is None or upkeep == Upkeep(release=upkeep.release)
        binds = bindings is None or bindings.plain is None
        return binds and self.pack is None and self.surroundings is None and releases

    @property
    def changes_nothing(self) -> bool:
        """True if it changes nothing on the engines, except that it releases objects."""
        return self.bindings is None and self.sends_nothing


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


give_codes(
    0,
    *(CallFunction, unpickle_team, StrategySpec, NamedArgument, HeldArgument, ReduceOp),
    *(Snapshot, Upkeep, Bindings, Surroundings, Inquiry),
)
