"""The tracked objects of each team, across the deaths and replacements of engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from distnb.notebook.handles.handle import state_of_handle
from distnb.notebook.namespace.handle_operations import HandleOperations
from distnb.notebook.namespace.tracked_objects import TrackedObjects
from distnb.values import Mirrored
from distnb.wire.exchange import TeamKey

__all__ = ["TrackedTeams"]


class TrackedTeams:
    """The tracked objects of each team that a strategy has used. Iterating uses a copy of the list."""

    def __init__(self, operations: HandleOperations, make: Callable[[TeamKey], TrackedObjects]) -> None:
        self._operations = operations
        self._make = make
        self._teams: dict[tuple[int, ...], TrackedObjects] = {}
        self._dead: set[int] = set()
        self._epochs = itertools.count(1)

    def __iter__(self) -> Iterator[TrackedObjects]:
        return iter(list(self._teams.values()))

    def of(self, engines: tuple[int, ...]) -> TrackedObjects:
        """Return the tracked objects of some engines. A team of which they are the survivors continues with them."""
        tracked = self._teams.get(engines)
        if tracked is None:
            for other in self:
                if self._lost_some(other) and set(other.key[0]) - self._dead == set(engines):
                    self._move(other, engines)
                    return other
            tracked = self._teams[engines] = self._make((engines, next(self._epochs)))
        return tracked

    def adopt(self, key: TeamKey) -> TrackedObjects:
        """Continue a team of an earlier notebook under the key that its engines know."""
        tracked = self._teams[key[0]] = self._make(key)
        self._epochs = itertools.count(max(key[1], next(self._epochs) - 1) + 1)
        return tracked

    def engine_died(self, engine: int) -> None:
        """Note that an engine's process has ended, from any thread."""
        self._dead.add(engine)

    def drop_dead_engines(self, tracked: TrackedObjects) -> None:
        """Continue a team with its living engines, if it has lost some and not all."""
        if self._lost_some(tracked):
            self._move(tracked, tuple(engine for engine in tracked.key[0] if engine not in self._dead))

    def _lost_some(self, tracked: TrackedObjects) -> bool:
        engines = tracked.key[0]
        return not self._dead.isdisjoint(engines) and not self._dead.issuperset(engines)

    def _move(self, tracked: TrackedObjects, engines: tuple[int, ...]) -> None:
        """Continue a team with fewer or more engines. The engines that stay keep its objects."""
        old, new = tracked.key, (engines, next(self._epochs))
        self._operations.rename(tuple(engine for engine in old[0] if engine in engines), old, new)
        del self._teams[old[0]]
        self._teams[engines] = tracked
        tracked.move(new)

    def engines_replaced(self, engines: Iterable[int], survivors: Iterable[int]) -> None:
        """Note that new processes have replaced some engines, and restore mirrored objects to them from a survivor."""
        replaced, alive = set(engines), set(survivors)
        self._dead -= replaced
        for tracked in self:
            grown = tuple(engine for engine in tracked.whole if engine in alive | replaced)
            if grown != tracked.key[0] and grown not in self._teams and not alive.isdisjoint(tracked.key[0]):
                self._move(tracked, grown)
        for key, tracked in list(self._teams.items()):
            if replaced.isdisjoint(key):
                continue
            kept = [replica for replica, engine in enumerate(key) if engine in alive]
            if not kept:
                tracked.end()
                del self._teams[key]
                continue
            lost = [replica for replica, engine in enumerate(key) if engine in replaced]
            self._restore(tracked, kept[0], lost)

    def _restore(self, tracked: TrackedObjects, survivor: int, lost: Sequence[int]) -> None:
        handles = tracked.handles()
        mirrored = tuple(state_of_handle(handle).identity for handle in handles if isinstance(handle, Mirrored))
        tracked.resend_all()  # the new processes have nothing
        restored = self._operations.restore(tracked, survivor, lost, mirrored)
        for handle in handles:
            state = state_of_handle(handle)
            if state.identity in restored:
                state.restored(lost, survivor)
            else:
                state.gone.update(tracked.key[0][replica] for replica in lost if replica in state.facts)

    def close(self) -> None:
        """End all teams when the cluster ends."""
        for tracked in self:
            tracked.end()
        self._teams.clear()
