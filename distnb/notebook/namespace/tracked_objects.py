"""The notebook's record of one group of engines: the objects that they have, and the handles of these objects."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from distnb.errors import CannotTravelError, DistnbError
from distnb.notebook.doubts import doubt
from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.namespace.bound_names import BoundNames
from distnb.notebook.namespace.known_surroundings import KnownSurroundings
from distnb.notebook.namespace.upkeep import PendingUpkeep
from distnb.objects.code.definitions import Classes
from distnb.objects.digesting import Digests, Side
from distnb.objects.packing import Packed
from distnb.objects.tracking import Tracker
from distnb.values import DistributedValues, Mirrored, PerReplica
from distnb.wire.exchange import Snapshot, TeamKey, argument_name, former
from distnb.wire.messages import ObjectId

__all__ = ["MISSING", "TrackedObjects"]

MISSING: Any = object()

_MOST_CLASSES = 64


class NotebookReferences:
    """The representatives of handles and distributed values in messages to one group of engines.

    Attributes:
        met: The handles that were digested or sent, by id, since this was last cleared.
    """

    def __init__(self, tracked: TrackedObjects) -> None:
        self._tracked = tracked
        self.met: dict[ObjectId, DistributedValues] = {}

    def digest_token(self, obj: Any) -> Any:
        """Return a handle's representative in a digest, or None for other objects."""
        if type(obj) not in HANDLES:
            return None
        state = state_of_handle(obj)
        self.met[state.identity] = obj
        return (state.identity,)

    def token(self, obj: Any, word: str = "own") -> Any:
        """Return the representative of a handle, or of a distributed value that the notebook created.

        Args:
            obj: Any object; None is returned for others.
            word: "own" if the engines replace a handle by its object, "argument" if it stays a distributed value.
        """
        handle, kind = obj, type(obj)
        if kind in HANDLES:
            return self._token_of_handle(handle, word)
        if kind in (PerReplica, Mirrored):
            tracked = self._tracked
            if handle.num_replicas != tracked.size:
                text = (
                    f"A {kind.__name__} of {handle.num_replicas} replica(s) cannot be sent to a program that runs on "
                    f"{tracked.size}. Create it for as many replicas, or pass strategy.local_results(value)."
                )
                return "refused", text, CannotTravelError.__name__
            return "components", kind.__name__, dict(zip(handle.replica_ids, handle.values, strict=True))
        return None

    def _token_of_handle(self, handle: DistributedValues, word: str) -> Any:
        state = state_of_handle(handle)
        self.met[state.identity] = handle
        try:
            self._tracked.check(handle)
        except DistnbError as error:
            return "refused", str(error), type(error).__name__
        return word, state.identity, state.local, "Mirrored" if isinstance(handle, Mirrored) else "PerReplica"

    def referred(self, keys: Iterable[int]) -> set[int]:
        """Return no `id()`: handles are no tensors."""
        return set()

    def send_by_value(self, parts: Any) -> None:
        """Do nothing: all tensors are sent by value."""

    def resolve(self, token: Any) -> Any:
        """Return the handle of an engine object to which an arrived value refers."""
        found = self._tracked.handle(token)
        return found if found is not None else self._tracked.make_handle(token)


class TrackedObjects:
    """The notebook's side of one group of engines.

    Attributes:
        key: The identity of the group.
        tracker: The objects that the engines have.
        bound: The bindings of names on the engines.
        surroundings: What surrounds the code on the engines.
        upkeep: The changes that the next snapshot reports to the engines.
        outstanding: The snapshots of the programs whose results have not been merged, by serial.
        ended: Whether the engines were restarted, stopped or left to another notebook.
        common: The ids of objects that the replicas have in common, as of the latest change of the engines.
        has_shards: Whether shards are to be divided again, since the engines have changed.
    """

    def __init__(self, key: TeamKey, user_ns: dict[str, Any], classes: Classes) -> None:
        self.key = key
        self._user_ns = user_ns
        self.references = NotebookReferences(self)
        self.tracker = Tracker(Side(user_ns=user_ns, references=self.references, classes=classes))
        self.bound = BoundNames(self.tracker)
        self.surroundings = KnownSurroundings()
        self.upkeep = PendingUpkeep()
        self.ended = False
        self.common: frozenset[ObjectId] = frozenset()
        self.has_shards = False
        self.outstanding: dict[int, Snapshot] = {}
        self._changing: set[int] = set()  # serials of programs that may change an object of the notebook's in place
        self._handles: dict[ObjectId, weakref.ref[Any]] = {}
        self.make_handle: Any = None  # set while results are applied: creates a handle for an id that has none

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.key.engines)

    # -- handles -------------------------------------------------------------------------------------------------------

    def add_handle(self, identity: ObjectId, handle: DistributedValues) -> None:
        """Add a handle of an engine object. The engines are notified when the handle is gone."""

        def gone(reference: weakref.ref[Any]) -> None:
            if self._handles.get(identity) is reference:
                del self._handles[identity]
                self.upkeep.released.append(identity)

        self._handles[identity] = weakref.ref(handle, gone)
        if identity in self.upkeep.released:
            self.upkeep.released.remove(identity)

    def handle(self, identity: ObjectId) -> Any:
        """Return the handle of an engine object; None if the notebook holds none."""
        reference = self._handles.get(identity)
        return reference() if reference is not None else None

    def handles(self) -> list[DistributedValues]:
        """Return all handles of these engines that the notebook holds."""
        return [handle for reference in list(self._handles.values()) if (handle := reference()) is not None]

    def check(self, handle: DistributedValues) -> None:
        """Raise if a handle's object is gone, or belongs to other engines."""
        state = state_of_handle(handle)
        state.check()
        if state.tracked is not self:
            its, ours = list(state.tracked.key.engines), list(self.key.engines)
            raise CannotTravelError(
                f"{state.label} ({state.type_name}) cannot be sent to this program: it belongs to a strategy of "
                f"{len(its)} replica(s) on engines {its}, and the program runs on {ours}"
                f"{' for a strategy that has lost engines' if its == ours else ''}. Fetch it with "
                "strategy.local_results(value), and pass the components that you need."
            )

    # -- the engines' values -----------------------------------------------------------------------------------------

    def pack(self, serial: int, values: Mapping[str, Any], digests: Digests) -> Packed | None:
        """Pack the values that the engines lack; None if they have all. Release values that are no longer needed.

        Args:
            serial: The serial of the snapshot.
            values: All values that the program reads, by name.
            digests: Their digests.
        """
        self.forget_arguments(frozenset(values))
        self.bound.send_by_value(values)
        rebound = [name for name in values if name in self.tracker and self.tracker.root(name) is not values[name]]
        self.release_names(rebound, serial)
        lacking = self.tracker.lacking(values, digests)
        return self.tracker.pack(serial << 1, values, digests, lacking) if lacking else None

    def has_only_data(self, values: Mapping[str, Any]) -> bool:
        """Return whether values contain neither code, nor handles of objects that refer to further names."""
        met, self.references.met = self.references.met, {}
        try:
            found = self.tracker.digest(values)
            if found.names or found.classes or found.refused or found.imports:
                return False
            return all(state_of_handle(handle).is_simple for handle in self.references.met.values())
        finally:
            self.references.met = met

    def has(self, values: Mapping[str, Any]) -> bool:
        """Return whether the engines have these values as they are now."""
        return not self.tracker.lacking(values, self.tracker.digest(values))

    def held_names(self) -> set[str]:
        """Return the names of values that engine objects hold."""
        return {
            name
            for handle in self.handles()
            for fact in state_of_handle(handle).facts.values()
            for name in fact.holds
            if isinstance(name, str)
        }

    def release_names(self, rebound: Iterable[str], serial: int) -> None:
        """Release names that are bound to other objects now, but keep the old values that engine objects hold."""
        names = list(rebound)
        formers = [name for name in self.tracker.names if "#" in name]
        if not names and not formers:
            return
        held = self.held_names()
        unheld = [name for name in formers if name not in held]
        self.forget_names(unheld)
        renamed = {name: former(name, serial) for name in names if name in held}
        gone = [name for name in names if name not in held]
        self.forget_names(gone)
        for old, new in renamed.items():
            self.tracker.rename(old, new)
            for handle in self.handles():
                for replica, fact in state_of_handle(handle).facts.items():
                    if old in fact.holds:
                        holds = tuple(new if name == old else name for name in fact.holds)
                        state_of_handle(handle).facts[replica] = fact._replace(holds=holds)
        self.upkeep.renamed |= renamed

    def forget_arguments(self, used: Iterable[str]) -> None:
        """Forget arguments of earlier calls that the user has no name for, and classes beyond a few.

        Those that engine objects hold stay.
        """
        unused = dict.fromkeys(name for name in self.tracker.names if name[0] in "@%" and name not in used)
        arguments = [name for name in unused if name[0] == "@"]
        if arguments:
            named = {argument_name(value) for value in self._user_ns.values()}
            arguments = [name for name in arguments if name not in named]
        classes = [name for name in unused if name[0] == "%"]
        if arguments or len(classes) > _MOST_CLASSES:
            held = self.held_names()
            old = [name for name in (*arguments, *classes[:-_MOST_CLASSES]) if name not in held]
            self.forget_names(old)

    def forget_names(self, names: Iterable[str]) -> None:
        """Forget the values of these names. The next snapshot notifies the engines."""
        gone = set(names)
        self.tracker.forget(gone)
        self.drop_unreferenced()
        self.tracker.send_again_with(gone)
        self.upkeep.forget |= gone

    def drop_unreferenced(self) -> None:
        """Free the unreferenced objects of values that are no longer needed, here and on the engines."""
        parts = self.tracker.drop_unreferenced()
        self.tracker.retire_numbers(parts)
        self.upkeep.unlike_parts.update(parts)

    # -- programs ----------------------------------------------------------------------------------------------------

    def note(self, snapshot: Snapshot, *, changing: bool) -> None:
        """Note a snapshot that is about to be sent; `changing` if its program may change the notebook's objects."""
        if self._changing:
            self._changing.intersection_update(self.outstanding)
        if changing:
            self._changing.add(snapshot.serial)
        self.outstanding[snapshot.serial] = snapshot

    @property
    def may_be_changed(self) -> bool:
        """True if a program whose results have not been merged may change an object of the notebook's in place."""
        return not self._changing.isdisjoint(self.outstanding)

    def resend_all(self) -> None:
        """Send everything again with the next program, since an engine may have missed something."""
        doubt()
        self.tracker.clear()
        self.outstanding.clear()
        self.bound.clear()
        self.surroundings.clear()
        self.upkeep.unlike_parts.clear()
        self.upkeep.fresh = True

    def reject(self, snapshot: Snapshot) -> None:
        """Give up the results of a program. Its snapshot may not have been opened."""
        self.outstanding.pop(snapshot.serial, None)
        self.upkeep.send_again(snapshot.upkeep)
        self.resend_all()

    def move(self, key: TeamKey) -> None:
        """Continue with other engines: renumber the components, and drop those of engines that are gone."""
        doubt()
        before, self.key = self.key.engines, key
        for handle in self.handles():
            state_of_handle(handle).move(before, key.engines)
            object.__setattr__(handle, "_num_replicas", len(key.engines))
        # A PerReplica handle represents other components when the team has fewer replicas.
        self.bound.forget_sent_handles()

    def end(self) -> None:
        """Make every handle stale when the engines are gone."""
        doubt()
        self.ended = True
