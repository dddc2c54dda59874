"""What the notebook knows of one group of engines: which of its objects they have, and what it holds by handles."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distnb.session.handles import HANDLES, RemoteState, state_of_handle
from distnb.values import DistributedValues, Mirrored, PerReplica
from distnb.wire.bindings import Confirmation, Delivery, Reloads, SpaceKey
from distnb.wire.environment import Environment
from distnb.wire.fingerprints import Fingerprint
from distnb.wire.graph import Unsendable
from distnb.wire.immutables import is_plain, same
from distnb.wire.messages import ObjectId
from distnb.wire.twins import Twins

__all__ = ["MISSING", "Argument", "NotebookSpace", "Plain", "Seeing", "distributed_types"]

MISSING: Any = object()


class Argument:
    """A handle as an argument of a call: there it stays a distributed value."""

    __slots__ = ("handle",)

    def __init__(self, handle: DistributedValues) -> None:
        self.handle = handle


@dataclass
class NotebookSpace:
    """The notebook's side of one group of engines.

    Attributes:
        twins: Its objects that the engines have, and handles.
        records: Fingerprints of the values that the engines have, by id (or by "name:…" for values without one).
        shapes: dtype and shape of each array and tensor there: another one cannot be taken on in place.
        bound: What each name is bound to on the engines: an id, a plain value, or None for what cannot be told from
            another by an id (a tuple that holds a list).
        environment: What the engines' environment is.
        ended: The engines were restarted or stopped.
        sources: File names whose text the engines have.
        outstanding: Deliveries of programs whose effects have not come, by serial.
        cell: The serial of the one that is a cell's: nothing else runs until its effects are taken in.
    """

    key: SpaceKey
    twins: Twins = field(default_factory=lambda: Twins(weak=True))
    records: dict[ObjectId | str, Fingerprint] = field(default_factory=dict)
    shapes: dict[ObjectId, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    environment: Environment | None = None
    ended: bool = False
    sources: set[str] = field(default_factory=set)
    modules: dict[str, Reloads] = field(default_factory=dict)
    confirmed: list[Confirmation] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    renamed: dict[ObjectId, ObjectId] = field(default_factory=dict)
    outstanding: dict[int, Delivery] = field(default_factory=dict)
    cell: int | None = None
    _rules: dict[type, Callable[[Any], Any]] = field(default_factory=dict)

    @property
    def rules(self) -> dict[type, Callable[[Any], Any]]:
        """How handles and distributed values stand in what is pickled for these engines."""
        if "torch" in sys.modules and len(self._rules) == len(distributed_types()):
            self._rules = {}  # made before torch was loaded
        if not self._rules:
            self._rules = _rules_of(self.by_reference)
        return self._rules

    def __post_init__(self) -> None:
        self.whole = self.key[0]  # the engines that it was made with, those that died since among them

    def move(self, key: SpaceKey) -> None:
        """Go on with other engines: components are renumbered, those of engines that are gone are lost."""
        before, self.key = self.key[0], key
        for handle in self.handles():
            state_of_handle(handle).move(before, key[0])
            object.__setattr__(handle, "_num_replicas", len(key[0]))

    @property
    def size(self) -> int:
        """How many replicas it has."""
        return len(self.key[0])

    def is_current(self, name: str, user_ns: dict[str, Any]) -> bool:
        """Whether what the engines have under a name is still what the notebook has."""
        value = user_ns.get(name, MISSING)
        marker = self.bound[name]
        if isinstance(marker, Plain):
            return value is not MISSING and same(value, marker.value)
        if isinstance(value, HANDLES):
            state = state_of_handle(value)
            return state.space is self and state.identity == marker
        return value is not MISSING and marker is not None and self.twins.id_of(value) == marker

    @property
    def has_news(self) -> bool:
        """Whether the engines are to hear of something with the next delivery, whatever it brings."""
        return bool(self.confirmed or self.rejected or self.renamed or self.twins.released)

    def bound_is_released(self) -> bool:
        """Whether an object that a name is bound to on the engines has died here."""
        released = set(self.twins.released)
        return bool(released) and any(marker in released for marker in self.bound.values() if isinstance(marker, tuple))

    def mark_bound(self, name: str, value: Any) -> None:
        """Note what a name is bound to on the engines."""
        if isinstance(value, HANDLES):
            self.bound[name] = state_of_handle(value).identity
        else:
            identity = self.twins.id_of(value)
            self.bound[name] = Plain(value) if identity is None and is_plain(value) else identity

    def reject(self, serial: int) -> None:
        """The effects of a program will not come: maybe not even its delivery was opened.

        What it brought, and what it may have changed, is sent again.
        """
        delivery = self.outstanding.pop(serial, None)
        if delivery is not None:
            self.tell_again(delivery)
            self.rejected.append(serial)

    def tell_again(self, delivery: Delivery) -> None:
        """Maybe an engine never opens a delivery: what it brought, and what it may have changed, is sent again.

        What it told is told again, too; an engine that knows passes over it.
        """
        serial = delivery.serial
        self.confirmed[:0] = delivery.confirmed
        self.rejected += delivery.rejected
        self.renamed = {**delivery.renamed, **self.renamed}
        self.twins.released.extend(delivery.release)
        brought = {identity for identity, _ in self.twins.items() if identity[0] == serial}
        for identity in delivery.watch:
            self.forget(identity)
        for key in [key for key, record in self.records.items() if not brought.isdisjoint(record.nodes)]:
            del self.records[key]
        self.twins.drop(brought)
        self.environment = None
        self.sources -= delivery.sources.keys()
        for name in delivery.modules:
            self.modules.pop(name, None)

    def give_up_cell(self) -> None:
        """A cell whose effects have not come by now failed without a word."""
        if self.cell in self.outstanding:
            self.reject(self.cell)
        self.cell = None

    def forget(self, identity: ObjectId) -> None:
        """Take it that the engines' object may differ from the notebook's."""
        record = self.records.pop(identity, None)
        for node in record.nodes if record is not None else (identity,):
            self.twins.contents.pop(node, None)

    def by_reference(self, handle: Any) -> Any:
        """How a handle, or a distributed value made in the notebook, stands in a delivery."""
        word = "own"
        if isinstance(handle, Argument):
            handle = handle.handle
            word = "argument"
        if not isinstance(handle, HANDLES):
            return self._components(handle)
        state = self.state(handle)
        if word == "own" and not state.local:
            return state.identity
        return word, state.identity, state.local, "Mirrored" if isinstance(handle, Mirrored) else "PerReplica"

    def state(self, handle: DistributedValues, *, in_part: bool = False) -> RemoteState:
        """A handle's state, once it is known to be of this space and alive.

        Args:
            in_part: It is enough if some replica has it.

        Raises:
            StaleHandleError: Its object is gone.
            Unsendable: It belongs to another group of engines.
        """
        state = state_of_handle(handle)
        state.check(() if in_part else None)
        if state.space is not self:
            raise Unsendable(
                handle,
                f"it belongs to a strategy of {state.space.size} replica(s) on engines "
                f"{list(state.space.key[0])}, and this program runs on "
                f"{list(self.key[0])}. Fetch it with strategy.local_results(value), and pass on what you need",
            )
        return state

    def _components(self, value: DistributedValues) -> Any:
        if value.num_replicas != self.size:
            raise Unsendable(
                value, f"it has components for {value.num_replicas} replica(s), and this program runs on {self.size}"
            )
        return (
            "components",
            "Mirrored" if isinstance(value, Mirrored) else "PerReplica",
            dict(zip(value.replica_ids, value.values, strict=True)),
        )

    def end(self) -> None:
        """Its engines are gone: every handle of it is stale."""
        self.ended = True

    def handles(self) -> list[DistributedValues]:
        """Every handle of this space that the notebook holds."""
        return [obj for _, obj in self.twins.items() if isinstance(obj, HANDLES)]


@dataclass(frozen=True)
class Plain:
    """Marks a name that is bound to an immutable value on the engines."""

    value: Any


class Seeing(dict[type, Callable[[Any], Any]]):
    """The rules of a pickler, noting which handles it met."""

    def __init__(self, rules: dict[type, Callable[[Any], Any]], seen: list[Any]) -> None:
        super().__init__(rules)
        for kind, rule in rules.items():
            self[kind] = functools.partial(_note_and_apply, seen, rule)


def _note_and_apply(seen: list[Any], rule: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (DistributedValues, Argument)):
        seen.append(value)
    return rule(value)


def _rules_of(stand_in: Callable[[Any], Any]) -> dict[type, Callable[[Any], Any]]:
    """The rules of a pickler for the engines, by type.

    Args:
        stand_in: Gives what a handle, or a distributed value, stands as.
    """
    rules: dict[type, Callable[[Any], Any]] = dict.fromkeys(distributed_types(), stand_in)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor"):
        rules[torch.Tensor] = _refuse_graph
    return rules


def _refuse_graph(tensor: Any) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise Unsendable(
            tensor,
            "it has a graph of operations behind it, which stays in this process. Pass on tensor.detach(), or compute "
            "it inside the distributed cell",
        )


def distributed_types() -> tuple[type, ...]:
    """The types that stand by reference in a delivery by a rule of their own."""
    return (*HANDLES, PerReplica, Mirrored, Argument)
