"""The operations of handles on their engine objects."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from distnb.errors import DistributedValueError, EngineDied, ReplicaStuck
from distnb.notebook.handles.handle import HANDLES, RemoteMethod, RemoteState, state_of_handle
from distnb.notebook.namespace.tracked_objects import TrackedObjects
from distnb.objects.packing import Packed
from distnb.options import StrategySpec
from distnb.values import DistributedValues
from distnb.wire.described_values import METHOD, Result, Summary, name_of_given
from distnb.wire.exchange import Request, Settlement, Snapshot, TeamKey
from distnb.wire.messages import ObjectId
from distnb.wire.value_facts import Holding, Inspected

if TYPE_CHECKING:
    from distnb.notebook.namespace.notebook_namespace import NotebookNamespace

__all__ = ["CommonObjects", "HandleOperations", "Perform"]

Path = tuple[tuple[str, Any], ...]


_READ_ONLY = ("summary", "read_summary", "inspect", "holdings", "nbytes", "get", "list", "read", "check")
"""The operations that do not count as changes of the object."""

_ON_SURVIVORS = ("summary", "inspect", "holdings", "nbytes")
"""The operations that are applied on the remaining replicas if others have lost the object."""


class Perform(Protocol):
    """A function that applies an operation to an object on some engines, and returns the answers by engine."""

    def __call__(
        self,
        engines: Sequence[int],
        operation: str,
        target: ObjectId,
        payload: Any = None,
        give_up: Callable[[dict[int, Any]], None] = ...,
    ) -> dict[int, Any]: ...


class CommonObjects(NamedTuple):
    """A copy of the objects that the replicas of a team have in common.

    Attributes:
        objects: Their ids, in the order of the pack.
        random: The states of random generators.
        has_shards: Whether the replicas hold shards of them, which are not copied.
    """

    pack: Packed
    objects: tuple[ObjectId, ...]
    random: bytes
    has_shards: bool


class HandleOperations:
    """The operations on engine objects, for all handles of a session.

    Attributes:
        changes: The number of programs so far that may have changed engine objects: cells, calls and operations.
        before: Called before an operation is packed, to send deferred calls first.
    """

    def __init__(self, namespace: NotebookNamespace, perform: Perform) -> None:
        self._namespace = namespace
        self._perform = perform
        self.changes = 0
        self.before: Callable[[], None] = lambda: None

    # -- forwarding ------------------------------------------------------------------------------------------------

    def run(
        self,
        handle: DistributedValues,
        operation: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        path: Path = (),
    ) -> Any:
        """Apply an operation on every replica that has the object.

        Return a plain value if all replicas return the same one, else a handle.
        """
        results = self._results(handle, operation, args, kwargs or {}, path)
        found = self._apply(handle, results)
        return found if operation == "next" else found[0]

    def attribute(self, handle: DistributedValues, path: Path) -> Any:
        """Return an attribute of the object: a plain value, a handle, or a method that is called by its path."""
        state = state_of_handle(handle)
        if not state.facts and state.local:
            raise AttributeError(_no_object(state))
        results = self._results(handle, "get", (), {}, path)
        if next(iter(results.values())).result == METHOD:
            self._namespace.apply_call(state.tracked, results, with_result=False)
            return RemoteMethod(handle, path)
        return self._apply(handle, results)[0]

    def _apply(self, handle: DistributedValues, results: dict[int, Result]) -> Any:
        """Apply the effects of an operation, and return its results as a list. The object may hold returned data."""
        state = state_of_handle(handle)
        found = _derived(handle, self._namespace.apply_call(state.tracked, results))
        name = name_of_given(next(iter(results.values())).serial)
        if name in state.tracked.tracker:
            state.add_held((name,))
            state.given += 1
        return found

    def _results(
        self, handle: DistributedValues, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any], path: Path
    ) -> dict[int, Result]:
        state = state_of_handle(handle)
        if operation not in _ON_SURVIVORS:
            state.check()
        if not state.facts and state.local:
            raise DistributedValueError(_no_object(state))
        asked = tuple(sorted(state.facts.keys() - state.lost))
        tracked = state.tracked
        self.before()
        snapshot = self._namespace.call_snapshot(tracked, (tuple(args), dict(kwargs)), touched=(handle,))
        answers = self._ask(tracked, operation, state.identity, Request(snapshot=snapshot, path=path, answers=asked))
        state.add_held(name for name in snapshot.inquiry.sections if name.startswith("@"))
        self.changes += operation not in _READ_ONLY
        state.as_of = -1
        return answers

    def _ask(self, tracked: TrackedObjects, operation: str, target: ObjectId, request: Request) -> dict[int, Any]:
        def give_up(results: dict[int, Any]) -> None:
            # After an operation that raised, as in `hasattr`, the engines still have the values that were sent.
            effects = results if all(isinstance(one, Result) for one in results.values()) else {}
            self._namespace.failed(request.snapshot, effects)

        # Every engine receives every snapshot, even if it returns no answer.
        answers = self._perform(tracked.key.engines, operation, target, request, give_up)
        return {tracked.key.engines.index(engine): answer for engine, answer in answers.items() if answer is not None}

    def rename(self, engines: Iterable[int], old: TeamKey, new: TeamKey | None, *, inherits: bool = False) -> None:
        """Notify engines that a team has another key, since it has become smaller or larger; None: it is dropped.

        Each engine is notified by a program of its own, so that the end of one engine does not keep it from the others.
        With `inherits`, they add the parts of replicas that leave to their own (see `settle`).
        """
        self._notify(engines, "rename", (old, new, inherits))

    def mark_copying(self, engines: Iterable[int], *, copying: bool) -> None:
        """Notify new engines that objects are being copied to them, or that they have got all.

        Until then, the next notebook regards such an engine as empty if this one ends.
        """
        if self._namespace.stays:
            self._notify(engines, "copying", copying)

    def _notify(self, engines: Iterable[int], operation: str, payload: Any) -> None:
        """Apply an operation to engines one by one, those that have ended left out."""
        interrupted = None
        for engine in engines:
            try:
                self._perform((engine,), operation, (0, ""), payload)
            except EngineDied:
                continue
            except (
                KeyboardInterrupt
            ) as interrupt:  # it arrived afterwards, because this operation cannot be interrupted
                interrupted = interrupt
        if interrupted is not None:
            raise interrupted

    def share_cores(self, engines: Mapping[int, int]) -> None:
        """Notify engines of the number of engines on their machine."""
        for engine, sharing in engines.items():
            with contextlib.suppress(EngineDied):
                self._perform((engine,), "threads", (0, ""), sharing)

    def settle(self, tracked: TrackedObjects, leaving: Sequence[int], strategies: Sequence[StrategySpec]) -> None:
        """Prepare a team for replicas that leave it, or for new ones. A `rename` with `inherits` follows.

        Note the objects that the replicas have in common, and whether there are shards.
        """
        self.before()
        settlement = Settlement(team=tracked.key, leaving=tuple(leaving), strategies=tuple(strategies))
        replies = self._perform(tracked.key.engines, "settle", (0, ""), settlement)
        common, tracked.has_shards = next(iter(replies.values()))
        tracked.common = frozenset(common)

    def divide(self, tracked: TrackedObjects) -> None:
        """Divide the shards of a team over its engines again."""
        self._perform(tracked.key.engines, "divide", (0, ""), tracked.key)
        self.changes += 1

    def name_of(self, state: RemoteState) -> str:
        """Return a name of the notebook that is bound to a handle of this state; "" if there is none."""
        bound = self._namespace.user_ns.items()
        return next(
            (
                name
                for name, value in bound
                if type(value) in HANDLES and state_of_handle(value) is state and not name.startswith("_")
            ),
            "",
        )

    # -- showing -----------------------------------------------------------------------------------------------------

    def refresh(self, handle: DistributedValues) -> bool:
        """Update the summaries if they do not exist, or if a program may have changed the object since.

        Returns:
            Whether they are up to date. While an engine is stuck, they may not be.
        """
        state = state_of_handle(handle)
        unseen = any(fact.summary.text is None for fact in state.facts.values())
        if not (state.outdated or unseen) or state.tracked.ended or not state.facts.keys() - state.lost:
            return True
        operation = "read_summary" if state.together and not state.lost else "summary"
        try:
            results = self._results(handle, operation, (), {}, ())
        except ReplicaStuck:
            return False
        for replica, one in results.items():
            summary: Summary = one.result
            state.facts[replica] = state.facts[replica]._replace(summary=summary._replace(text=summary.text or ""))
        self._namespace.apply_call(state.tracked, results, with_result=False)
        state.as_of = self.changes
        return True

    def inspect(self, handle: DistributedValues) -> dict[int, Inspected] | None:
        """Return the facts about each replica's component, by replica; None while an engine is stuck.

        Components that the notebook has itself are left out.
        """
        found: dict[int, Inspected] | None = self._inspect_components(handle, "inspect")
        return found

    def holdings(self, handle: DistributedValues) -> dict[int, tuple[Holding, ...]] | None:
        """Return the parts of a value that each replica holds; None while an engine is stuck."""
        found: dict[int, tuple[Holding, ...]] | None = self._inspect_components(handle, "holdings")
        return found

    def nbytes(self, handle: DistributedValues) -> dict[int, int] | None:
        """Return the number of bytes of a value's tensors, by replica; None while an engine is stuck."""
        found: dict[int, int] | None = self._inspect_components(handle, "nbytes")
        return found

    def _inspect_components(self, handle: DistributedValues, operation: str) -> dict[int, Any] | None:
        state = state_of_handle(handle)
        if state.tracked.ended or not state.facts.keys() - state.lost:
            return {}
        as_of = state.as_of
        try:
            results = self._results(handle, operation, (), {}, ())
        except ReplicaStuck:
            return None
        self._namespace.apply_call(state.tracked, results, with_result=False)
        state.as_of = as_of  # its summaries were not updated
        return {replica: one.result for replica, one in results.items()}

    def read(self, handle: DistributedValues) -> Any:
        """Return a copy of a mirrored object: replica 0's, or the combination of all replicas' parts."""
        if not state_of_handle(handle).together:
            return self.fetch_components(handle, (0,))[0]
        whole = self.run(handle, "read")
        return self.fetch_components(whole, (0,))[0] if isinstance(whole, HANDLES) else whole

    def gathered(self, handles: Sequence[DistributedValues]) -> dict[int, Any]:
        """Gather objects of which the replicas hold shards.

        Returns:
            Handles of whole copies, which share what the objects share, by the `id()` of the objects' handles.
        """
        from distnb.runtime.scopes.divided_objects import gather_divided  # loads torch

        divided = [handle for handle in handles if state_of_handle(handle).divided]
        if not divided:
            return {}
        wholes = self.run(divided[0], "apply", (gather_divided, *divided))
        return dict(zip(map(id, divided), wholes, strict=True))

    def fetch_components(self, handle: DistributedValues, replicas: Iterable[int]) -> dict[int, Any]:
        """Return copies of the components of some replicas."""
        state = state_of_handle(handle)
        wanted = list(replicas)
        state.check(wanted)
        for replica in wanted:
            state.check_assigned(replica)
        if state.divided:
            return dict.fromkeys(wanted, self.read(handle))
        found = {replica: state.local[replica] for replica in wanted if replica in state.local}
        found |= {replica: value for replica in wanted if (value := state.known(replica)) is not None}
        remote = [replica for replica in wanted if replica not in found]
        packs = self._fetch(state.tracked, "fetch", remote, (state.identity,))
        found.update({replica: state.tracked.tracker.open_loose(pack)["@0"] for replica, pack in packs.items()})
        return {replica: found[replica] for replica in wanted}

    def _fetch(
        self, tracked: TrackedObjects, operation: str, replicas: Sequence[int], targets: tuple[ObjectId, ...]
    ) -> dict[int, Packed]:
        """Fetch packed copies of several objects from some replicas."""
        if not replicas:
            return {}
        self.before()
        touched = [handle for target in targets if (handle := tracked.handle(target)) is not None]
        snapshot = self._namespace.call_snapshot(tracked, None, touched=touched)
        return self._transfer(
            tracked,
            operation,
            targets[0],
            Request(snapshot=snapshot, path=(), answers=tuple(replicas), targets=targets),
        )

    def _transfer(self, tracked: TrackedObjects, operation: str, target: ObjectId, request: Request) -> dict[int, Any]:
        """Apply an operation that has no results to be merged."""
        answers = self._ask(tracked, operation, target, request)
        tracked.outstanding.pop(request.snapshot.serial, None)
        return answers

    def copies(self, states: Sequence[RemoteState], replica: int = 0) -> list[Any]:
        """Return copies of several objects of one team. Objects that the originals share are shared by the copies too.

        A placeholder represents an object that cannot be copied.
        """
        tracked = states[0].tracked
        packs = self._fetch(tracked, "copies", (replica,), tuple(state.identity for state in states))
        return list(tracked.tracker.open_loose(packs[replica]).values())

    # -- new engines -------------------------------------------------------------------------------------------------

    def restore(
        self, tracked: TrackedObjects, survivor: int, new: Sequence[int], mirrored: tuple[ObjectId, ...]
    ) -> set[ObjectId]:
        """Copy the notebook's objects, and objects that the replicas have in common, from a survivor to new engines.

        Return the ids of the copied objects.

        Raises:
            EngineDied: An engine of the team has ended.
        """
        copied = self._copy(tracked, survivor, mirrored, lambda copied: self._open(tracked, "import", new, copied))
        tracked.has_shards = tracked.has_shards or copied.has_shards
        return set(copied.objects)

    def save(self, tracked: TrackedObjects, mirrored: tuple[ObjectId, ...]) -> CommonObjects:
        """Return a copy of what `restore` copies, from a team's only engine, for a later one."""
        engines = tracked.key.engines
        return self._copy(tracked, engines[0], mirrored, lambda copied: self._open(tracked, "try", engines, copied))

    def revive(self, tracked: TrackedObjects, saved: CommonObjects) -> set[ObjectId]:
        """Give a team's only engine what `save` has copied. Return the ids; none if it cannot open an object."""
        self.before()
        return set() if self._open(tracked, "revive", tracked.key.engines, saved) else set(saved.objects)

    def _copy(
        self,
        tracked: TrackedObjects,
        source: int,
        mirrored: tuple[ObjectId, ...],
        unopened_of: Callable[[CommonObjects], set[ObjectId]],
    ) -> CommonObjects:
        """Have an engine copy its objects, without those that `unopened_of` finds."""
        self.before()
        left_out: tuple[ObjectId, ...] = ()
        while True:
            snapshot, (replica,) = self._snapshot_with(tracked, (source,))
            request = Request(snapshot=snapshot, answers=(replica,), targets=mirrored, left_out=left_out)
            copied = CommonObjects(*self._transfer(tracked, "export", (0, ""), request)[replica])
            unopened = unopened_of(copied)
            if not unopened:
                return copied
            left_out += tuple(unopened)

    def _open(
        self, tracked: TrackedObjects, operation: str, engines: Sequence[int], copied: CommonObjects
    ) -> set[ObjectId]:
        """Have engines open copied objects. Return the ids of those that cannot be opened."""
        snapshot, replicas = self._snapshot_with(tracked, engines)
        request = Request(
            snapshot=snapshot, answers=replicas, targets=copied.objects, pack=copied.pack, random=copied.random
        )
        answers = self._transfer(tracked, operation, (0, ""), request).values()
        return {each for each in answers if each is not None}

    def _snapshot_with(self, tracked: TrackedObjects, engines: Sequence[int]) -> tuple[Snapshot, tuple[int, ...]]:
        """Return a snapshot, and the replicas on some engines in it, all of which must be alive."""
        snapshot = self._namespace.call_snapshot(tracked, None)
        if missing := [engine for engine in engines if engine not in tracked.key.engines]:
            self._namespace.failed(snapshot)
            raise EngineDied(f"Engine {missing[0]} ended while objects were copied.")
        return snapshot, tuple(map(tracked.key.engines.index, engines))

    def bind_again(self, tracked: TrackedObjects) -> None:
        """Bind the notebook's data on new replicas, too, if the engines stay: the next notebook has it from them only.

        Otherwise data is sent when a program needs it.
        """
        bound, user_ns = tracked.bound, self._namespace.user_ns
        names = [name for name in sorted(bound.earlier) if name in user_ns and type(user_ns[name]) not in HANDLES]
        if self._namespace.stays and names:
            snapshot = self._namespace.call_snapshot(tracked, None, names=names)
            self._transfer(tracked, "bind", (0, ""), Request(snapshot=snapshot, answers=()))
        bound.earlier.clear()


def _no_object(state: RemoteState) -> str:
    kinds = ", ".join(sorted({type(value).__name__ for value in state.local.values()}))
    return (
        f"This PerReplica holds one plain value ({kinds}) per replica in the notebook, and no object on the engines "
        "with attributes or methods. Get the values with strategy.local_results(value)."
    )


def _derived(handle: DistributedValues, result: Any) -> Any:
    """Return the result of an operation on a handle. The handles in it record that handle as an ancestor."""
    for part in result if type(result) in (list, tuple) else (result,):
        if type(part) in HANDLES and part is not handle and not state_of_handle(part).ancestors:
            state_of_handle(part).ancestors = (weakref.ref(handle), *state_of_handle(handle).ancestors)
    return result
