"""The engine's side of the one namespace: deliveries are opened here, and what programs did is described."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distnb.engine import operations
from distnb.engine.descriptions import Describer
from distnb.engine.guard import spared
from distnb.engine.modules import Modules
from distnb.engine.objects import Objects, Pending, Space
from distnb.engine.sources import remember_source
from distnb.engine.travel import pack_effects
from distnb.errors import NamespaceError
from distnb.options import StrategySpec
from distnb.runtime.randomness import streams
from distnb.strategies.scope import adopt_restored
from distnb.values import Mirrored, PerReplica, structure
from distnb.wire.ambient import forget_casts, outside_inference
from distnb.wire.bindings import Delivery, Described, Effects, Mark, Repeat, Returned, SpaceKey, unpack_indexes
from distnb.wire.environment import Environment, apply_environment, capture_environment
from distnb.wire.fingerprints import Fingerprint, fingerprint
from distnb.wire.frozen import note_frozen
from distnb.wire.graph import GraphUnpickler, Side
from distnb.wire.immutables import SCALARS
from distnb.wire.messages import Apply, ObjectId
from distnb.wire.nodes import apply_state
from distnb.wire.outlines import fill, outline
from distnb.wire.twins import NOT_THERE, is_value_twin, sent_id

__all__ = ["EngineNamespace"]

_HIDDEN = re.compile(r"_+|_i+|_\d+|_i\d+|_[od]h|In|Out|exit|quit|open|get_ipython|__\w+__")


class EngineNamespace:
    """Keeps the engine's user namespace what the notebook's is, as far as programs read it.

    Args:
        user_ns: The engine's one namespace.
        objects: The engine's objects by id.
        engine: This engine's id: its place among a space's engines is its replica.
        reserved: Names that the engine itself binds before a program runs.

    Attributes:
        adopt: Called with each object restored from a survivor, and the strategy that made it, to keep it in sync.
    """

    def __init__(
        self, user_ns: dict[str, Any], objects: Objects, *, engine: int | None = None, reserved: Iterable[str] = ()
    ) -> None:
        self.user_ns = user_ns
        self.objects = objects
        self.side = Side(user_ns)
        self.describer = Describer(self.side)
        self.adopt: Callable[[Any, StrategySpec | None], None] = adopt_restored
        self._engine = engine
        self._reserved = frozenset(reserved)
        self._environment: Environment | None = None
        self._modules = Modules()
        self._arguments: Any = None
        self._call: Mark | None = None
        self._moves = -1
        # Fallback for `open` and `begin` being two calls: which delivery the next `begin` belongs to.
        self._delivery: Delivery | Repeat | None = None

    def replica_in(self, key: SpaceKey) -> int:
        """Which replica of a group of engines this one is."""
        return key[0].index(self._engine) if self._engine in key[0] else self.objects.space(key).replica

    # -- before a program ------------------------------------------------------------------------------------------

    def open(self, delivery: Delivery | Repeat, replica: int) -> None:
        """Bind what a delivery brings. To be called before `begin`, in the order in which deliveries were made."""
        self._call = None
        space = self.objects.space(delivery.space)
        space.replica = replica
        forget_casts()
        if isinstance(delivery, Repeat):
            of, kept = space.kept.get(delivery.place, (0, None))
            if of != delivery.of:
                raise NamespaceError(
                    "The call that this one repeats was ended before it began on this replica, so that its function "
                    "and arguments are not here. Call it again."
                )
            self._arguments = fill(kept)
            self._delivery = delivery
            return
        self._settle(space, delivery)
        for name in delivery.delete:
            self.user_ns.pop(name, None)
        environment = delivery.environment
        if environment is not None:
            apply_environment(environment, early=True)
        self._modules.follow(delivery.modules)
        for filename, (text, label) in delivery.sources.items():
            remember_source(filename, text, label)
        with outside_inference():
            self._arguments = self._unpack(delivery, space) if delivery.blob is not None else None
        if delivery.keep is not None:
            space.kept[delivery.keep] = delivery.serial, outline(self._arguments)
        if environment is not None:
            apply_environment(environment, early=False)
            self._environment = None
        self._delivery = delivery

    def open_call(self, delivery: Delivery, replica: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Open the delivery of a call. Returns its arguments; `close_call` ends what this began."""
        self.open(delivery, replica)
        args, kwargs = self._arguments
        self._arguments = None
        self._call = self.begin("")
        return args, kwargs

    def _unpack(self, delivery: Delivery, space: Space) -> Any:
        assert delivery.blob is not None
        unpickler = GraphUnpickler(delivery.blob, self.side, lambda pid: self._find(pid, space))
        bindings = unpickler.load()
        arguments = unpickler.load()
        for _ in range(delivery.updates):
            identity, kind, state = unpickler.load()
            node = space.twins.get(identity)
            if node is not NOT_THERE:
                apply_state(node, kind, state)
            space.fingerprints.pop(identity, None)
        indexes = unpack_indexes(delivery.nodes)
        if indexes:
            memo = unpickler.memo.copy()
            for index in indexes:
                space.twins.add(sent_id(delivery.serial, index), memo[index])
        for name, value in bindings.items():
            if value is not NOT_THERE:
                self.user_ns[name] = value
            else:
                self.user_ns.pop(name, None)
        return arguments

    def _find(self, pid: Any, space: Space) -> Any:
        """The object that stands by reference in a delivery."""
        if len(pid) == 2:
            return space.twins.get(pid)
        word, what, components, *rest = pid
        if word == "components":  # a distributed value that the user made in the notebook: each replica takes its own
            kind = Mirrored if what == "Mirrored" else PerReplica
            own = {space.replica: components[space.replica]} if space.replica in components else components
            return kind(own, space.size)
        component = components[space.replica] if space.replica in components else space.twins.get(what)
        if word == "own" or component is NOT_THERE or structure.select(component, space.replica) is not component:
            return component  # the last: it is, or holds, distributed values, as a batch of a cell does
        kind = Mirrored if rest[0] == "Mirrored" else PerReplica
        return kind({space.replica: component}, space.size)

    @spared
    def _settle(self, space: Space, delivery: Delivery) -> None:
        for confirmation in delivery.confirmed:
            pending = space.pending.pop(confirmation.serial, None)
            if pending is None:
                continue
            for index in unpack_indexes(confirmation.nodes):
                if index in pending.nodes:  # a replica that was cut off may have told another story
                    space.twins.add(sent_id(confirmation.serial, index, by_engine=True), pending.nodes[index])
            unwanted = pending.registered - set(confirmation.names)
            space.twins.drop((confirmation.serial, path) for path in unwanted)
        for serial in delivery.rejected:
            pending = space.pending.pop(serial, None)
            if pending is not None:
                self._undo(pending.names)
            space.twins.drop([identity for identity, _ in space.twins.items() if identity[0] == serial])
        for old, new in delivery.renamed.items():
            node = space.twins.get(old)
            space.twins.drop((old,))
            if node is not NOT_THERE:
                space.twins.add(new, node)
        space.twins.drop(delivery.release)
        for identity in delivery.release:
            space.fingerprints.pop(identity, None)

    def _undo(self, names: dict[str, Any]) -> None:
        for name, before in names.items():
            if before is Pending.absent:
                self.user_ns.pop(name, None)
            else:
                self.user_ns[name] = before

    # -- around a program ------------------------------------------------------------------------------------------

    def begin(self, source: str) -> Mark:
        """Note where the namespace stands, just before a program runs."""
        assert self._delivery is not None
        delivery, self._delivery = self._delivery, None
        space = self.objects.space(delivery.space)
        for identity in delivery.watch:
            if identity not in space.fingerprints:
                self._remember(space, identity)
        if self._environment is None:
            self._environment = self._capture_environment()
        return Mark(dict(self.user_ns), delivery, self._environment)

    def _capture_environment(self, before: Environment | None = None) -> Environment:
        """The environment as it is now.

        Args:
            before: As it was before a program that may have left a replica's random streams lingering: the shared ones
                are then known, if nobody moved them.
        """
        if before is not None and streams.lingering and streams.moves == self._moves:
            return capture_environment(before, before.generators)
        streams.settle()
        self._moves = streams.moves
        return capture_environment(before)

    def note_names(self) -> Callable[[], None]:
        """Note what is bound now. What is returned takes back all that was bound since: see `runtime.contexts`."""
        before = dict(self.user_ns)

        def take_back() -> None:
            self._undo({name: before.get(name, Pending.absent) for name in self._assigned(before)})

        return take_back

    def finish(self, mark: Mark, result: Callable[[Space, int], Any] | None = None) -> Effects:
        """Describe what a program did, whether it failed or not.

        Args:
            mark: What `begin` gave.
            result: For a call, describes its result.

        Raises:
            BaseException: What ended this. Then it is as if the reply were lost: the notebook will ask to undo it.
        """
        try:
            return self._finish(mark, result)
        except BaseException:
            space = self.objects.space(mark.delivery.space)
            before = {name: mark.before.get(name, Pending.absent) for name in self._assigned(mark.before)}
            space.pending[mark.delivery.serial] = Pending({}, before, space.registered)
            space.registered = set()
            self.describer.ended()
            raise

    def _finish(self, mark: Mark, result: Callable[[Space, int], Any] | None) -> Effects:
        space, serial = self.objects.space(mark.delivery.space), mark.delivery.serial
        if self._is_untouched(mark):
            return self._finish_untouched(mark, space, result)
        streams.settle()  # what is pickled may draw random numbers
        assigned = self._assigned(mark.before)
        names, code = self._describe_names(assigned, space, serial)
        changed = self._changed(mark, space)
        luggage = pack_effects(code, changed, space, self.side, serial, self.describer)
        self.describer.expect({sent_id(serial, index, by_engine=True): obj for index, obj in luggage.memo.items()})
        names, fresh = self.describer.completed(names), self.describer.completed(luggage.fresh)
        described = result(space, serial) if result is not None else None
        for identity in changed:
            space.fingerprints.pop(identity, None)
        handles = self._read_handles(mark, space)
        self.describer.ended()
        before = {name: mark.before.get(name, Pending.absent) for name in assigned}
        deleted = tuple(name for name in mark.before if name not in self.user_ns and not self._is_hidden(name))
        before.update({name: mark.before[name] for name in deleted})
        if luggage.memo or before or space.registered:
            space.pending[serial] = Pending(luggage.memo, before, space.registered)
            space.registered = set()
        after = self._capture_environment(mark.environment)
        environment = after.since(mark.environment)
        self._environment = after
        return Effects(
            serial,
            names,
            deleted,
            luggage.blob,
            luggage.updates,
            luggage.changed,
            fresh,
            handles,
            None if environment.empty else environment,
            described,
        )

    def _is_untouched(self, mark: Mark) -> bool:
        """Whether the program read no objects that it may have changed, and assigned and deleted no name."""
        before, now = mark.before, self.user_ns
        return (
            not mark.delivery.watch
            and not mark.delivery.handles
            and len(before) == len(now)
            and all(map(operator.is_, before, now))
            and all(map(operator.is_, before.values(), now.values()))
        )

    def _finish_untouched(self, mark: Mark, space: Space, result: Callable[[Space, int], Any] | None) -> Effects:
        serial = mark.delivery.serial
        described = result(space, serial) if result is not None else None
        self.describer.ended()
        if space.registered:
            space.pending[serial] = Pending({}, {}, space.registered)
            space.registered = set()
        after = self._capture_environment(mark.environment)
        environment = after.since(mark.environment)
        self._environment = after
        return Effects(serial, environment=None if environment.empty else environment, result=described)

    def close_call(self, result: Any) -> Effects | Returned:
        """Describe the result of a call that `open_call` began, and what else it did."""
        if type(result) in SCALARS:
            mark = self._call
            assert mark is not None
            if self._is_untouched(mark) and not self.objects.space(mark.delivery.space).registered:
                environment = self._capture_environment(mark.environment)
                if environment is mark.environment:
                    self._call = None
                    return Returned(mark.delivery.serial, result)
        else:
            streams.settle()  # what is pickled may draw random numbers
        return self.finish_with(lambda space, serial: self.describer.tree(result, space, serial))

    def give_up_call(self) -> Effects | None:
        """Describe what a call did that raised; None if it raised before `open_call` was through."""
        mark, self._call = self._call, None
        return self.finish(mark) if mark is not None else None

    def finish_with(self, result: Callable[[Space, int], Any]) -> Effects:
        """End what `open_call` began, with a result that is described by a function."""
        mark, self._call = self._call, None
        assert mark is not None
        return self.finish(mark, result)

    def apply(self, message: Apply) -> Any:
        """Carry out an operation that a handle asked for."""
        return operations.carry_out(self, message)

    def _assigned(self, before: Mapping[str, Any]) -> list[str]:
        return sorted(
            name
            for name, value in self.user_ns.items()
            if (name not in before or before[name] is not value) and not self._is_hidden(name)
        )

    def _is_hidden(self, name: str) -> bool:
        return name in self._reserved or not isinstance(name, str) or _HIDDEN.fullmatch(name) is not None

    def _describe_names(
        self, assigned: list[str], space: Space, serial: int
    ) -> tuple[dict[str, Described], dict[str, Any]]:
        # All ids first: each description tells which other objects it holds.
        for name in assigned:
            self.describer.register(self.user_ns[name], space, (serial, name))
        names = {name: self.describer.value(self.user_ns[name], space, (serial, name)) for name in assigned}
        code = {name: self.user_ns[name] for name, described in names.items() if described.kind == "code"}
        return names, code

    def _remember(self, space: Space, identity: ObjectId) -> Fingerprint | None:
        node = space.twins.get(identity)
        if node is NOT_THERE:
            return None
        found = fingerprint(node, self.side, space.twins, by_reference="owned")
        space.fingerprints[identity] = found
        for key, digest in found.arrays.items():
            known = space.twins.ids.get(key)
            if known is not None:
                space.twins.contents[known] = digest
        note_frozen(found.nodes, self.side, space.twins)
        return found

    def _changed(self, mark: Mark, space: Space) -> dict[ObjectId, bytes | None]:
        """The notebook's objects in those that the program may have changed, if one of them did change.

        Returns:
            For arrays and tensors their content's digest now, where it was taken.
        """
        changed: dict[ObjectId, bytes | None] = {}
        for identity in mark.delivery.watch:
            before = space.fingerprints.get(identity)
            node = space.twins.get(identity)
            if before is None or node is NOT_THERE:
                continue
            now: Fingerprint | None = None
            with contextlib.suppress(Exception):  # something that cannot be pickled was put in
                now = fingerprint(node, self.side, space.twins, by_reference="owned")
            if now is None or not now.matches(before):
                for each in (*before.nodes, *(now.nodes if now is not None else ())):
                    changed.setdefault(each, None)
                for key, digest in now.arrays.items() if now is not None else ():
                    if (known := space.twins.ids.get(key)) in changed:
                        changed[known] = digest
                space.fingerprints.pop(identity, None)
        return {identity: digest for identity, digest in changed.items() if is_value_twin(identity)}

    def _read_handles(self, mark: Mark, space: Space) -> dict[ObjectId, Described]:
        found = {}
        for identity in mark.delivery.handles:
            node = space.twins.get(identity)
            if node is not NOT_THERE:
                found[identity] = self.describer.object(node, space, identity, "known")
        return found
