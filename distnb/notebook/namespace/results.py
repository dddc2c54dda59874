"""Merging a program's results: names are bound, the notebook's objects are updated, and handles are created."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distnb.notebook.doubts import doubt
from distnb.notebook.handles.handle import HANDLES, RemoteState, change_kind, make_handle, state_of_handle
from distnb.notebook.namespace.differences import changes_of
from distnb.notebook.namespace.tracked_objects import MISSING, TrackedObjects
from distnb.objects.code.definitions import is_code
from distnb.objects.modes.environment import apply_environment
from distnb.objects.pack_tables import part_of
from distnb.objects.packing import Packed
from distnb.objects.placeholder import Placeholder
from distnb.objects.plain import same
from distnb.objects.replica_versions import copies_in, merge_copies
from distnb.values import Mirrored, structure
from distnb.views.wording import human_bytes
from distnb.wire.described_values import (
    Described,
    DescribedObject,
    Leaf,
    ModuleValue,
    PlainValue,
    Result,
    SentValue,
    TrackedValue,
    as_object,
    leaf_name,
)
from distnb.wire.exchange import former
from distnb.wire.messages import ObjectId

if TYPE_CHECKING:
    from distnb.notebook.namespace.handle_operations import HandleOperations

__all__ = ["Results"]

_CHANGED = "was changed differently by the replicas"


class Results:
    """The results of one program, as the replicas of a team report them.

    Args:
        results: The results by replica. A replica that died or was cut off has none.
        changes: The value of `operations.changes` when the program was sent; None for the current value.
        most_nbytes: The size above which data has stayed on the engines.
    """

    def __init__(
        self,
        tracked: TrackedObjects,
        user_ns: dict[str, Any],
        operations: HandleOperations,
        results: Mapping[int, Result],
        announce: Callable[[str], None],
        changes: int | None = None,
        most_nbytes: int = 0,
    ) -> None:
        self._tracked = tracked
        self._user_ns = user_ns
        self._operations = operations
        self._results = dict(sorted(results.items()))
        self._announce = announce
        self._changes = operations.changes if changes is None else changes
        self._most_nbytes = most_nbytes
        self._first = next(iter(self._results.values()))
        self._serial = self._first.serial
        self._sent: dict[str, Any] = {}
        self._different: dict[int, Any] = {}
        self._numbers: dict[int, dict[int, int]] = {}  # the notebook's numbers of objects, by replica and number there
        self._plain: dict[int, dict[str, Any]] = {}
        self._failed: dict[str, Exception] = {}
        self._objects: dict[int, dict[ObjectId, tuple[str, DescribedObject]]] = {}  # with names, by replica and id
        self._returned: list[Described] = []

    def apply(self) -> None:
        """Bind all names and update all objects."""
        tracked = self._tracked
        tracked.make_handle = self._fresh_handle
        every = self._results.values()
        if all(results.only_returned for results in every):
            return
        doubt()
        self._rename_former()
        environment = tracked.surroundings.in_order(self._first.environment, self._serial)
        if environment is not None:
            apply_environment(environment, early=True)  # paths, before anything is imported
        names = sorted({name for results in every for name in results.names})
        # Code that runs when other values are opened may use these.
        early = [
            name
            for name in names
            if all(isinstance(results.names.get(name), PlainValue | ModuleValue) for results in every)
        ]
        self._import_submodules({name for results in every for name in results.imported})
        for name in early:
            self._bind(name)
        self._open_packs()
        for name in names:
            if name not in early:
                self._bind(name)
        for name in self._first.deleted:
            if all(name in results.deleted for results in every):
                self._user_ns.pop(name, None)
        self._describe_handles()
        alike = all(results.environment == self._first.environment for results in every)
        tracked.surroundings.accept(environment, alike=alike and len(every) == tracked.size)
        if any(results.names or results.deleted for results in every):
            tracked.bound.latest = None  # the program bound names itself

    def _import_submodules(self, names: Iterable[str]) -> None:
        """Import the submodules that the program has imported, so that `import xml.dom` works in later cells, too."""
        for name in sorted(names):
            with contextlib.suppress(Exception):  # the module may exist on the engines' machines only
                importlib.import_module(name)

    def result(self) -> Any:
        """Return the result of a call, regrouped: a plain value if all replicas agree on it, else a handle."""
        trees = {replica: results.result for replica, results in self._results.items()}
        first = next(iter(trees.values()))
        path = self._first.result_name
        if all(isinstance(tree, Leaf) for tree in trees.values()):
            return self._combine_leaves(trees, path)
        specs = {replica: structure.structure_of(tree) for replica, tree in trees.items()}
        if len(set(specs.values())) > 1:
            raise structure.unlike_structures(specs)
        leaves = {replica: structure.flatten(tree)[0] for replica, tree in trees.items()}
        rows = enumerate(zip(*leaves.values(), strict=True))
        combined = [
            self._combine_leaves(dict(zip(leaves, row, strict=True)), leaf_name(path, index)) for index, row in rows
        ]
        return structure.unflatten(structure.flatten(first)[1], combined)

    def _combine_leaves(self, leaves: Mapping[int, Leaf], path: str) -> Any:
        described = {replica: leaf.described for replica, leaf in leaves.items()}
        self._returned += described.values()
        return self._combine("", described, path)

    # -- values that were sent -----------------------------------------------------------------------------------------

    def _open_packs(self) -> None:
        """Merge the values that the replicas sent. Objects that they changed differently become handles."""
        every = list(self._results.values())
        names = {name for results in every for name in results.changed}
        alike = {name for name in names if len({results.changed.get(name) for results in every}) == 1}
        sent = {name for results in every if results.pack is not None for name in results.pack.names}
        for name in names - sent:
            self._handles_by_name((name,), "now holds too many tensors, or other objects that stay on the replicas")
        names, alike = names & sent, alike & sent
        if len(every) == self._tracked.size:
            alike = self._common(alike)
        merged = self._merge_versions(names - alike) if names - alike else set()
        if self._first.pack is not None and self._first.pack.data:
            self._open_pack(self._first.pack, alike, in_place=not names - alike, merged=merged)
        else:
            self._forget_parts(merged=merged)

    def _merge_versions(self, names: set[str]) -> set[str]:
        """Merge the values that only some replicas changed, or that they changed differently.

        The change of an object is everybody's if the replicas that changed the object did the same. Otherwise the
        object becomes a handle.

        Args:
            names: The names of the values.

        Returns:
            The names of the values that the notebook has merged. The others became handles as a whole.
        """
        tracker, every = self._tracked.tracker, self._results
        unshared = {name for name in names if self._holds_unshared(name)}
        self._handles_by_name(unshared)
        names = {name for name in names - unshared if name in tracker}
        changed = {replica: names & results.changed.keys() for replica, results in every.items()}
        copies = {
            replica: copies_in(tracker, pack)
            for replica, results in every.items()
            if changed[replica] and (pack := results.pack) is not None
        }
        digests = {
            name: {every[replica].changed[name] for replica in every if name in changed[replica]} for name in names
        }
        unlike = {name for name in names if len(digests[name]) > 1}
        alike: Mapping[int, Any] = {}
        if unlike:
            alike, different = changes_of(tracker, copies, names)
            self._different = self._handles_for(different)
            if not (alike or different):  # the difference was not found, or there are too many objects
                self._handles_by_name(unlike)
                names -= unlike
        for replica, each in copies.items():
            self._numbers[replica] = {copy.number_there: number for number, copy in each.objects.items()}
        values, failed = merge_copies(tracker, names, list(copies.values()), alike, self._different)
        for name, error in failed.items():
            self._announce(_cannot_be_opened(name.partition("#")[0], error))
        self._handles_by_name(failed)
        self._rebind(values)
        return set(values)

    def _holds_unshared(self, name: str) -> bool:
        """Return whether the program put an object that stays on the replicas into a value on some of them only."""
        made = [
            {identity for identity in results.fresh if identity[1].rpartition("*")[0] == name}
            for results in self._results.values()
        ]
        return any(each != made[0] for each in made)

    def _open_pack(self, pack: Packed, names: set[str], *, in_place: bool, merged: set[str]) -> None:
        """Open the first replica's pack.

        Args:
            names: The names of the notebook's values that all replicas changed alike, and that are updated.
            in_place: Whether the notebook's memory is overwritten while the pack is read, which requires that all
                values were changed alike.
            merged: The names of the values that were changed otherwise, and have been merged.
        """
        tracker, sent = self._tracked.tracker, self._agreed_sent()
        classes = {name for name in pack.names if name[0] == "%"} - merged
        agreed = [name for name in pack.names if name in sent or name in names or name in classes]
        opening = tracker.opening(pack, agreed, in_place=in_place)
        for name in pack.names:
            value = opening.load(name)
            if name in sent and is_code(value):
                self._user_ns[name] = value
        failed = self._failed = opening.failed
        common = self._common((sent | names).intersection(agreed) - failed.keys())
        values = tracker.merge(opening, common=common)
        common -= failed.keys()  # merging may have added some
        self._sent = {name: values[name] for name in sent if name not in failed}
        for name, error in failed.items():
            if name in names and name in tracker:
                self._announce(_cannot_be_opened(name.partition("#")[0], error))
                self._handles_by_name((name,))
        self._rebind({name: values[name] for name in agreed if name in names - failed.keys()})
        tracker.accept({name: values[name] for name in common})
        self._forget_parts(common, merged=merged)

    def _common(self, names: set[str]) -> set[str]:
        """Return the names whose objects have the same numbers on all replicas, since they were packed alike."""
        if len(self._results) < self._tracked.size:
            return set()
        orders = [results.pack.orders if results.pack is not None else {} for results in self._results.values()]
        return {name for name in names if len({order.get(name) for order in orders}) == 1}

    def _forget_parts(self, common: Collection[str] = (), *, merged: Collection[str]) -> None:
        """Have the engines forget the values that they packed.

        Args:
            common: The names of values that stay, with their new numbers.
            merged: The names of values that stay with their earlier numbers.
        """
        packs = [results.pack for results in self._results.values() if results.pack is not None]
        gone = {(pack.serial, name) for pack in packs for name in pack.names if name not in common}
        self._tracked.upkeep.unlike_parts.update(part_of(serial, name) for serial, name in gone)
        self._forget(name for _, name in gone if name not in merged)

    def _handles_for(self, differing: Mapping[int, Mapping[int, int]]) -> dict[int, Any]:
        """Create handles of objects that the replicas changed differently, by number, and bind the objects' names."""
        found = {}
        for number, given in differing.items():
            identity = (self._serial, f"#{number}")
            # The other replicas have left the object as it was, with the notebook's number.
            self._tracked.upkeep.adopt[identity] = {replica: given.get(replica, number) for replica in self._results}
            found[number] = self._handle_of_different(identity, self._tracked.tracker.find(number))
        return found

    def _handles_by_name(self, names: Iterable[str], what_happened: str = _CHANGED) -> None:
        """Create handles of whole values, whose differences are unknown."""
        for name in names:
            identity = (self._serial, f"#{name}")
            self._tracked.upkeep.adopt[identity] = name
            if name in self._tracked.tracker:
                self._handle_of_different(identity, self._tracked.tracker.root(name), what_happened)
            self._forget((name,))

    def _handle_of_different(self, identity: ObjectId, old: Any, what_happened: str = _CHANGED) -> Any:
        names = [name for name, value in self._user_ns.items() if value is old and not name.startswith("_")]
        facts = {replica: DescribedObject(identity=identity) for replica in self._results}
        handle = self._handle(identity, facts, name=names[0] if names else "", mirrored=False)
        state_of_handle(handle).as_of = -1
        for name in names:
            self._user_ns[name] = handle
            self._tracked.bound.assign(name, handle)
        what = f"`{names[0]}`" if names else f"A {type(old).__qualname__} in the notebook"
        self._announce(
            f"distnb: {what} {what_happened}. It is now a PerReplica handle of the replicas' versions. Get them with "
            f"strategy.local_results({names[0] if names else 'value'}), replica 0's with [0]."
        )
        return handle

    def _rename_former(self) -> None:
        """Rename values that were sent under names which the program has assigned."""
        tracker = self._tracked.tracker
        every = self._results.values()
        for name in {name for results in every for name in results.names if name in tracker}:
            new = former(name, self._serial)
            tracker.rename(name, new)
            if not all(name in results.names for results in every):
                self._forget((name, new))

    def _agreed_sent(self) -> set[str]:
        """Return the names of the values that all replicas sent alike."""
        agreed = set()
        every = [{**results.names, **results.data_given} for results in self._results.values()]
        for name, described in every[0].items():
            descriptions = [named.get(name) for named in every]
            digests = [one.kept.digest for one in descriptions if isinstance(one, SentValue)]
            if isinstance(described, SentValue) and len(digests) == len(descriptions) and len(set(digests)) == 1:
                agreed.add(name)
        return agreed

    def _rebind(self, values: Mapping[str, Any]) -> None:
        """Bind names to new objects where the old ones could not be updated in place."""
        for name, value in values.items():
            if name in self._tracked.tracker:
                old = self._tracked.tracker.root(name)
                name = name.partition("#")[0]
                if old is not value and self._user_ns.get(name, MISSING) is old:
                    self._user_ns[name] = value

    def _forget(self, names: Iterable[str]) -> None:
        gone = list(names)
        self._tracked.tracker.forget(gone)
        self._tracked.upkeep.forget.update(gone)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _bind(self, name: str) -> None:
        every = self._results.items()
        described = {replica: results.names[name] for replica, results in every if name in results.names}
        value = self._combine(name, described, name)
        nbytes = max((one.nbytes for one in described.values() if isinstance(one, DescribedObject)), default=0)
        if nbytes and name != "_":
            self._announce(
                f"distnb: `{name}` ({human_bytes(nbytes)}) stays on the replicas, like all data larger than "
                f"{human_bytes(self._most_nbytes)}, and is a handle here. Fetch it: strategy.local_results({name})[0]. "
                "%distnb start --data-limit SIZE changes the limit."
            )
        self._tracked.bound.assign(name, value)
        shell = self._user_ns.get("get_ipython") if name == "_" else None
        if callable(shell) and shell() is not None:
            shell().displayhook.update_user_ns(value)  # `__`, `_3` and `Out` as well
        else:
            self._user_ns[name] = value

    def _combine(self, name: str, described: dict[int, Described], path: str) -> Any:
        """Return the notebook's value of a name or a result. The engines keep it under `path`, too."""
        first = next(iter(described.values()))
        complete = len(described) == len(self._results)
        value = MISSING
        if complete and all(type(one) is type(first) for one in described.values()):
            if isinstance(first, PlainValue):
                value = self._combine_plain(described, path)
            elif isinstance(first, ModuleValue):
                value = self._combine_modules(name, described, path)
            elif isinstance(first, DescribedObject):
                value = self._combine_objects(name, described)
            elif isinstance(first, TrackedValue):
                value = self._tracked_object(_numbers(described))
            else:
                value = self._combine_sent(name, described, path)
        return self._mixed(name, described, path) if value is MISSING else value

    def _combine_plain(self, described: Mapping[int, Any], path: str) -> Any:
        values = [self._plain_value(replica, path, one) for replica, one in described.items()]
        agree = type(values[0]) is Placeholder or all(same(values[0], other) for other in values[1:])
        return values[0] if agree else MISSING

    def _combine_modules(self, name: str, described: Mapping[int, Any], path: str) -> Any:
        module = next(iter(described.values())).name
        if any(one.name != module for one in described.values()):
            return MISSING
        try:
            return importlib.import_module(module)
        except Exception as error:  # importing runs code of any kind  # noqa: BLE001
            return self._replacement(name or module, path, described, error)

    def _combine_objects(self, name: str, described: Mapping[int, Any]) -> Any:
        identity = next(iter(described.values())).identity
        if any(one.identity != identity for one in described.values()):
            return MISSING
        found = self._tracked.handle(identity)
        return found if found is not None else self._handle(identity, dict(described), name=name)

    def _combine_sent(self, name: str, described: Mapping[int, Any], path: str) -> Any:
        if path in self._sent:
            return self._sent[path]
        first = next(iter(described.values()))
        if first.number in self._different:
            return self._different[first.number]
        found = self._tracked_object(_numbers(described))
        if found is MISSING and all(one.kept.digest == first.kept.digest for one in described.values()):
            return self._replacement(name, path, described, self._failed.get(path))
        return found

    def _tracked_object(self, given: Mapping[int, int | None]) -> Any:
        """Return the notebook's object that all replicas describe by its number, or MISSING.

        Args:
            given: The number on each replica; None if it has none.
        """
        tracker = self._tracked.tracker
        numbers = {
            None if number is None else self._numbers.get(replica, {}).get(number, number)
            for replica, number in given.items()
        }
        number = numbers.pop()
        if not numbers and number is not None:
            with contextlib.suppress(KeyError):
                # An object of a forgotten value is not returned: changes here would not be sent.
                if tracker.name_of(number) in tracker:
                    return tracker.find(number)
        return MISSING

    def _plain_value(self, replica: int, path: str, described: PlainValue) -> Any:
        if not described.packed:
            return described.value
        if replica not in self._plain:
            pack = self._results[replica].plain
            assert pack is not None
            self._plain[replica] = self._tracked.tracker.open_loose(pack)
        return self._plain[replica][path]

    def _mixed(self, name: str, described: dict[int, Described], path: str) -> Any:
        """Return a handle of a name that not all replicas assigned, or that they assigned differently."""
        local = {
            replica: self._plain_value(replica, path, one)
            for replica, one in described.items()
            if isinstance(one, PlainValue)
        }
        kept = {replica: one for replica, one in described.items() if replica not in local}
        before = self._user_ns.get(name, MISSING) if name else MISSING
        identity: ObjectId = (self._serial, path)
        facts = {replica: as_object(one) or DescribedObject(identity=identity) for replica, one in kept.items()}
        if any(isinstance(one, SentValue | TrackedValue) for one in kept.values()):  # it stays on the engines after all
            self._tracked.upkeep.adopt[identity] = {
                replica: one.number if isinstance(one, TrackedValue) else identity for replica, one in kept.items()
            }
        others = [replica for replica in self._results if replica not in described]
        if isinstance(before, HANDLES):
            old = state_of_handle(before)
            if old.tracked is self._tracked:  # replicas that did not assign the name keep its old value
                local.update({replica: old.local[replica] for replica in others if replica in old.local})
                unassigned = [replica for replica in others if replica in old.facts]
                facts.update({replica: old.facts[replica]._replace(identity=identity) for replica in unassigned})
                if unassigned:
                    self._tracked.upkeep.adopt[identity] = dict.fromkeys(unassigned, old.identity)
        elif before is not MISSING:
            local.update(dict.fromkeys(others, before))
        return self._handle(identity, facts, name=name, local=local, mirrored=False)

    def _replacement(
        self, name: str, path: str, described: Mapping[int, SentValue | ModuleValue], error: Exception | None
    ) -> Any:
        """Return a handle of an object that is the same on all replicas and cannot exist in the notebook."""
        kept = {replica: one for replica, each in described.items() if (one := as_object(each)) is not None}
        identities = {one.identity for one in kept.values()}
        identity = identities.pop() if len(identities) == 1 else (self._serial, path)
        found = self._tracked.handle(identity)
        if found is None:
            self._tracked.upkeep.adopt[identity] = dict.fromkeys(kept, identity)
            why = "" if error is None else f"it cannot be opened in the notebook ({type(error).__name__}: {error})"
            facts = {replica: one._replace(identity=identity, why=why) for replica, one in kept.items()}
            found = self._handle(identity, facts, name=name)
            state_of_handle(found).as_of = -1
        if error is not None:
            self._announce(_cannot_be_opened(name, error))
        return found

    # -- handles -------------------------------------------------------------------------------------------------------

    def _handle(
        self,
        identity: ObjectId,
        facts: dict[int, DescribedObject],
        *,
        name: str = "",
        local: dict[int, Any] | None = None,
        mirrored: bool | None = None,
    ) -> Any:
        if mirrored is None:
            mirrored = are_equal(facts) and len(facts) == len(self._results)
        state = RemoteState(
            tracked=self._tracked,
            operations=self._operations,
            identity=identity,
            facts=dict(facts),
            local=local or {},
            name=name,
        )
        state.as_of = self._changes
        state.gone = {engine for place, engine in enumerate(self._tracked.key.engines) if place not in self._results}
        handle = make_handle(state, mirrored=mirrored, size=self._tracked.size)
        self._tracked.add_handle(identity, handle)
        return handle

    def _fresh_handle(self, identity: ObjectId) -> Any:
        """Create a handle of an engine object within data that has arrived. The object may have a name too."""
        unknown = DescribedObject(identity=identity)
        facts, names = {}, {}
        for replica, one in self._results.items():
            if replica not in self._objects:
                objects = {name: each for name, each in one.names.items() if isinstance(each, DescribedObject)}
                self._objects[replica] = {each.identity: (name, each) for name, each in objects.items()}
            names[replica], facts[replica] = self._objects[replica].get(
                identity, ("", one.fresh.get(identity, unknown))
            )
        return self._handle(identity, facts, name=next(iter(names.values())))

    def release(self) -> None:
        """Have the engines free the program's objects that have no handle here. Call this last."""
        described = [*self._returned, *(each for one in self._results.values() for each in one.names.values())]
        made = {kept.identity for each in described if (kept := as_object(each)) is not None}
        made.update(*(one.fresh for one in self._results.values()))
        tracked, released = self._tracked, self._tracked.upkeep.released
        released += [
            identity
            for identity in made
            if identity[0] == self._serial and tracked.handle(identity) is None and identity not in released
        ]

    def _describe_handles(self) -> None:
        for identity in self._first.handles:
            handle = self._tracked.handle(identity)
            if handle is None:
                continue
            state = state_of_handle(handle)
            every = self._results.items()
            facts = {replica: results.handles[identity] for replica, results in every if identity in results.handles}
            state.facts.update(facts)
            state.given = 0
            state.as_of = self._changes
            # After an engine has ended, the remaining components do not show whether its component was equal to them.
            known = len(state.facts) == self._tracked.size and (isinstance(handle, Mirrored) or not state.gone)
            if known and not any(fact.sharing.wrapped for fact in facts.values()):
                change_kind(handle, mirrored=are_equal(state.facts))


def _numbers(described: Mapping[int, Any]) -> dict[int, int | None]:
    return {replica: one.number for replica, one in described.items()}


def _cannot_be_opened(name: str, error: Exception) -> str:
    return (
        f"distnb: `{name}` could not be opened in the notebook ({type(error).__name__}: {error}). It is a handle of "
        "the replicas' object."
    )


def are_equal(facts: Mapping[int, DescribedObject]) -> bool:
    """Return whether the described object is equal on every replica."""
    described = list(facts.values())
    if any(one.sharing.wrapped for one in described):
        return False
    if all(one.sharing.mirrored for one in described):
        return True
    return described[0].digest is not None and len({one.digest for one in described}) == 1
