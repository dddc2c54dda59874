"""Taking in what a program did: names are bound, the notebook's objects updated in place, handles made."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distnb.session import records
from distnb.session.agreeing import are_equal, leaves_of
from distnb.session.handles import HANDLES, RemoteState, change_kind, make_handle, state_of_handle
from distnb.session.replacing import replace_everywhere
from distnb.session.spaces import MISSING, NotebookSpace
from distnb.values import Mirrored
from distnb.wire.bindings import Confirmation, Described, Effects, Leaf, pack_indexes
from distnb.wire.codec import Parcel
from distnb.wire.environment import apply_environment
from distnb.wire.fingerprints import fingerprint
from distnb.wire.frozen import REPLACED
from distnb.wire.graph import GraphUnpickler, Side
from distnb.wire.immutables import same
from distnb.wire.messages import ObjectId
from distnb.wire.nodes import apply_state, is_node, without_passing
from distnb.wire.twins import NOT_THERE, is_value_twin, sent_id

if TYPE_CHECKING:
    from distnb.session.operations import Operations

__all__ = ["Arrival"]


class Arrival:
    """The effects of one program, as the replicas of a space tell them.

    Args:
        space: Theirs.
        user_ns: The notebook's namespace.
        side: This process.
        operations: What handles talk through.
        effects: By replica; those that died or were cut off have none.
        watch: The notebook's objects that the program might have changed.
        announce: Told when an object of the notebook became a handle.
    """

    def __init__(
        self,
        space: NotebookSpace,
        user_ns: dict[str, Any],
        side: Side,
        operations: Operations,
        effects: Mapping[int, Effects],
        watch: tuple[ObjectId, ...],
        announce: Callable[[str], None],
    ) -> None:
        self._space = space
        self._user_ns = user_ns
        self._side = side
        self._operations = operations
        self._effects = dict(sorted(effects.items()))
        self._watch = watch
        self._announce = announce
        self._first = next(iter(self._effects.values()))
        self._serial = self._first.serial
        self._code: dict[str, Any] = {}
        self._kept_names: set[str] = set()
        self._nodes = b""
        # What is moved from one holder to another must not die on the way.
        self._held: list[Any] = []
        self._successors: dict[ObjectId, Any] = {}
        self._made: list[RemoteState] = []

    def take_in(self) -> None:
        """Bind and update everything."""
        self._hold()
        self._nodes = self._take_blob()
        for name in sorted({name for effects in self._effects.values() for name in effects.names}):
            self._bind(name)
        for name in self._first.deleted:
            if all(name in effects.deleted for effects in self._effects.values()):
                self._user_ns.pop(name, None)
                self._space.bound.pop(name, None)
        self._describe_handles()
        self._take_environment()

    def _hold(self) -> None:
        """Keep the notebook's objects that names and results are now."""
        for effects in self._effects.values():
            described = [*effects.names.values(), *(leaf.described for leaf in leaves_of(effects.result))]
            known = [one.identity for one in described if one.kind == "known" and one.identity is not None]
            self._held += map(self._space.twins.get, known)

    def _twin(self, identity: ObjectId) -> Any:
        """The notebook's object of an id, or what has taken its place since the program began."""
        found = self._successors.get(identity, NOT_THERE)
        return self._space.twins.get(identity) if found is NOT_THERE else found

    def confirm(self) -> None:
        """Let the engines know, with the next delivery, that everything was taken in."""
        if all(effects.only_plain_result for effects in self._effects.values()):
            return  # they wait for nothing
        for state in self._made:  # only now has all that they hold twins
            state.describe({})
        self._space.confirmed.append(Confirmation(self._serial, self._nodes, tuple(sorted(self._kept_names))))

    def result(self) -> Any:
        """The result of a call, regrouped: a plain value where all replicas agree on it, else a handle.

        Raises:
            StructureError: The replicas returned different structures.
        """
        from distnb.values import structure

        trees = {replica: effects.result for replica, effects in self._effects.items()}
        first = next(iter(trees.values()))
        if isinstance(first, Leaf) and all(isinstance(tree, Leaf) for tree in trees.values()):
            return self._combine("", {replica: tree.described for replica, tree in trees.items()}, "r")
        specs = {replica: structure.structure_of(tree) for replica, tree in trees.items()}
        if len(set(specs.values())) > 1:
            raise structure.unlike_structures(specs)
        leaves = {replica: structure.flatten(tree)[0] for replica, tree in trees.items()}
        shape = structure.flatten(first)[1]
        rows = enumerate(zip(*leaves.values(), strict=True))
        combined = [
            self._combine("", dict(zip(leaves, (leaf.described for leaf in row), strict=True)), f"r{index}")
            for index, row in rows
        ]
        return structure.unflatten(shape, combined)

    # -- functions, classes, objects changed in place ------------------------------------------------------------------

    def _take_blob(self) -> bytes:
        blobs = {replica: effects for replica, effects in self._effects.items() if effects.blob is not None}
        if not blobs:
            return b""
        first = next(iter(blobs.values()))
        assert first.blob is not None
        different = self._different_nodes()
        unpickler = GraphUnpickler(first.blob, self._side, self._find)
        code = unpickler.load()
        self._code = {name: value for name, value in code.items() if self._is_same_code(name)}
        skip = {id(code)}
        # All at once: an object that leaves one container, and enters another, must not die in between.
        updates = [unpickler.load() for _ in range(first.updates)]
        current = records.take_out(self._space, self._side, {identity for identity, _, _ in updates})
        self._apply(updates, different)
        del updates
        code = None
        memo = unpickler.memo.copy()
        unpickler.memo = {}
        nodes = self._register(memo, skip)
        for identity in different:
            self._become_handle(identity)
        records.put_back(self._space, self._side, current)
        return pack_indexes(nodes)

    def _apply(self, updates: list[Any], different: dict[ObjectId, None]) -> None:
        """Bring the notebook's objects up to date; those that cannot be are `different`, too."""
        for identity, kind, state in updates:
            node = self._space.twins.get(identity)
            if identity in different or node is NOT_THERE:
                continue
            if kind == REPLACED:
                self._replace(identity, node, state)
                continue
            try:
                apply_state(node, kind, state)
            except Exception:  # noqa: BLE001
                different[identity] = None

    def _different_nodes(self) -> dict[ObjectId, None]:
        """The notebook's objects that were not changed alike on all replicas."""
        changed = [effects.changed for effects in self._effects.values()]
        seen = {identity: None for one in changed for identity in one}
        return {
            identity: None
            for identity in seen
            if len({one.get(identity, identity) for one in changed}) > 1
            or (b"" in [one.get(identity) for one in changed] and len(changed) > 1)
        }

    def _is_same_code(self, name: str) -> bool:
        told = [effects.names.get(name) for effects in self._effects.values()]
        digests = [one.digest for one in told if one is not None and one.kind == "code"]
        return len(digests) == len(told) and len(set(digests)) == 1

    def _find(self, pid: Any) -> Any:
        found = self._twin(pid)
        if found is not NOT_THERE:
            return found
        facts = {replica: effects.fresh[pid] for replica, effects in self._effects.items() if pid in effects.fresh}
        return self._handle(pid, facts) if facts else self._revive(pid)

    def _revive(self, identity: ObjectId) -> Any:
        """A handle for an object whose last handle died a moment ago: the engines have not heard of that yet."""
        facts = {}
        for replica, effects in self._effects.items():
            known = [described for described in effects.names.values() if described.identity == identity]
            facts[replica] = known[0] if known else Described("object", identity=identity, reads=None)
        return self._handle(identity, facts)

    def _register(self, memo: dict[int, Any], skip: set[int]) -> list[int]:
        twins = self._space.twins
        nodes = [
            (index, obj)
            for index, obj in memo.items()
            if is_node(obj) and id(obj) not in twins.ids and not isinstance(obj, HANDLES)
        ]
        memo.clear()
        for _, obj in nodes:
            attributes = getattr(obj, "__dict__", None)
            if type(attributes) is dict:
                skip.add(id(attributes))
        obj = None
        kept = []
        for index, obj in without_passing(nodes):
            # As when packing: what only this list holds was made for the way.
            if sys.getrefcount(obj) > 3 and id(obj) not in skip:
                twins.add(sent_id(self._serial, index, by_engine=True), obj)
                kept.append(index)
        return kept

    def _replace(self, identity: ObjectId, old: Any, new: Any) -> None:
        """An object that cannot change in place: a new one takes its place."""
        self._space.twins.drop((identity,))
        self._space.twins.released.append(identity)
        self._successors[identity] = new
        replace_everywhere(old, new, self._user_ns)

    def _become_handle(self, identity: ObjectId) -> None:
        """An object that the replicas changed differently: a handle takes its place wherever it is seen."""
        space = self._space
        node = space.twins.get(identity)
        if node is NOT_THERE:
            return
        new = (self._serial, f"#{identity[0]}{identity[1]}")
        holds: tuple[ObjectId, ...] = ()
        with contextlib.suppress(Exception):  # what a part of it became may be nothing that can be pickled
            found = fingerprint(node, self._side, space.twins, space.rules)
            holds = tuple(held for held in found.nodes if held != identity)
        facts = {replica: Described("object", identity=new, reads=None, holds=holds) for replica in self._effects}
        handle = self._handle(new, facts, mirrored=False)
        state_of_handle(handle).as_of = -1
        self._successors[identity] = handle
        space.twins.drop((identity,))
        space.renamed[identity] = new
        space.records.pop(identity, None)
        names = replace_everywhere(node, handle, self._user_ns)
        for name in names:
            space.mark_bound(name, handle)
        state_of_handle(handle).name = names[0] if names else ""
        what = f"`{names[0]}`" if names else f"A {type(node).__qualname__} in the notebook"
        self._announce(
            f"distnb: {what} was changed differently by the replicas. It is now a PerReplica handle of what each of "
            "them has; strategy.local_results gives the components."
        )
        space.twins.contents.pop(identity, None)

    # -- names -----------------------------------------------------------------------------------------------------

    def _bind(self, name: str) -> None:
        described = {
            replica: effects.names[name] for replica, effects in self._effects.items() if name in effects.names
        }
        value = self._combine(name, described, name)
        self._user_ns[name] = value
        self._space.mark_bound(name, value)

    def _combine(self, name: str, described: dict[int, Described], path: str) -> Any:
        """The one thing that a name, or a result, is in the notebook. The engines keep it under `path`, too."""
        complete = len(described) == len(self._effects)
        first = next(iter(described.values()))
        kinds = {one.kind for one in described.values()}
        if complete and kinds == {"plain"}:
            found = self._agreed(described)
            if found is not MISSING:
                return found
        if complete and kinds == {"module"} and len({one.value for one in described.values()}) == 1:
            with contextlib.suppress(ImportError):
                return importlib.import_module(first.value)
        if complete and kinds == {"code"} and name in self._code:
            return self._code[name]
        if complete and kinds <= {"known", "object"} and len({one.identity for one in described.values()}) == 1:
            assert first.identity is not None
            return self._same_object(name, first.identity, described)
        return self._mixed(name, described, path)

    def _agreed(self, described: dict[int, Described]) -> Any:
        values = [self._plain(one) for one in described.values()]
        return values[0] if all(same(values[0], other) for other in values[1:]) else MISSING

    def _plain(self, described: Described) -> Any:
        value = described.value
        return GraphUnpickler(value, self._side, self._find).load() if isinstance(value, Parcel) else value

    def _same_object(self, name: str, identity: ObjectId, described: dict[int, Described]) -> Any:
        found = self._twin(identity)
        if is_value_twin(identity):
            return found
        if found is NOT_THERE:
            found = self._handle(identity, described, name=name)
        if identity[0] == self._serial:
            self._kept_names.add(identity[1])
        return found

    def _mixed(self, name: str, described: dict[int, Described], path: str) -> Any:
        """Replicas differ in what they assigned, or in whether they did."""
        self._kept_names.add(path)
        local = {replica: self._plain(one) for replica, one in described.items() if one.kind == "plain"}
        facts = {replica: one for replica, one in described.items() if one.kind != "plain"}
        before = self._user_ns.get(name, MISSING) if name else MISSING
        if before is not MISSING and not isinstance(before, HANDLES):
            local.update({replica: before for replica in self._effects if replica not in described})
        return self._handle((self._serial, path), facts, name=name, local=local, mirrored=False)

    def _handle(
        self,
        identity: ObjectId,
        facts: dict[int, Described],
        *,
        name: str = "",
        local: dict[int, Any] | None = None,
        mirrored: bool | None = None,
    ) -> Any:
        if mirrored is None:
            mirrored = are_equal(facts) and len(facts) == len(self._effects)
        state = RemoteState(self._space, self._operations, identity, facts, local or {}, name)
        state.as_of = self._operations.changes
        state.gone = {engine for place, engine in enumerate(self._space.key[0]) if place not in self._effects}
        state.describe(facts)
        self._made.append(state)
        handle = make_handle(state, mirrored=mirrored, size=self._space.size)
        self._space.twins.add(identity, handle, findable=False)
        with contextlib.suppress(ValueError):
            self._space.twins.released.remove(identity)
        return handle

    # -- handles that were read, environment -------------------------------------------------------------------------

    def _describe_handles(self) -> None:
        for identity in self._first.handles:
            handle = self._space.twins.get(identity)
            if not isinstance(handle, HANDLES):
                continue
            state = state_of_handle(handle)
            facts = {
                replica: effects.handles[identity]
                for replica, effects in self._effects.items()
                if identity in effects.handles
            }
            self._held += state.describe(facts)
            state.as_of = self._operations.changes
            # Of components that differed, what is left when an engine has ended is not what all have.
            known = len(state.facts) == self._space.size and (isinstance(handle, Mirrored) or not state.gone)
            if known and not any(fact.wrapped for fact in facts.values()):
                change_kind(handle, mirrored=are_equal(state.facts))

    def _take_environment(self) -> None:
        environment = self._first.environment
        known = self._space.environment
        if environment is not None:
            apply_environment(environment)
        if known is None:
            return
        if (
            all(effects.environment == environment for effects in self._effects.values())
            and len(self._effects) == self._space.size
        ):
            self._space.environment = known.with_changes(environment)
        else:
            self._space.environment = None  # they differ: the next delivery brings all of it
