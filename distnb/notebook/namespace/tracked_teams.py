"""The tracked objects of each team, across the deaths and replacements of engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from distnb.errors import OptionError
from distnb.notebook.handles.handle import change_kind, state_of_handle
from distnb.notebook.namespace.handle_operations import HandleOperations
from distnb.notebook.namespace.tracked_objects import TrackedObjects
from distnb.options import StrategySpec
from distnb.values import DistributedValues, Mirrored
from distnb.wire.exchange import TeamKey

__all__ = ["Grown", "TrackedTeams"]

Grown = Mapping[tuple[int, ...], tuple[int, ...]]
"""The engines of each team that gains some, by its engines so far."""


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

    def adopt(self, key: TeamKey, engines: Iterable[int]) -> TrackedObjects:
        """Continue a team of an earlier notebook under the key that its engines know.

        `engines` are those of the cluster. If that notebook ended during a resize, the team may have others.
        """
        tracked = self._teams[key[0]] = self._make(key)
        there = set(engines)
        tracked.whole = tuple(engine for engine in key[0] if engine in there)
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

    def _move(self, tracked: TrackedObjects, engines: tuple[int, ...], *, takes_over: bool = False) -> None:
        """Continue a team with fewer or more engines. The engines that stay keep its objects."""
        old, new = tracked.key, (engines, next(self._epochs))
        try:
            staying = [engine for engine in old[0] if engine in engines and engine not in self._dead]
            self._operations.rename(staying, old, new, takes_over=takes_over)
        finally:
            del self._teams[old[0]]
            self._teams[engines] = tracked
            tracked.move(new)

    def engines_replaced(
        self, engines: Iterable[int], survivors: Iterable[int], grown: Grown = MappingProxyType({})
    ) -> list[DistributedValues]:
        """Note new processes, of replaced engines or of further ones, and copy objects to them from a survivor.

        Args:
            engines: The engines with new processes.
            survivors: The engines that kept their processes.
            grown: The engines of each team that gains some, by its engines so far.

        Returns:
            The handles of objects that were mirrored, and could not be copied to further engines.
        """
        replaced, alive = set(engines), set(survivors)
        self._dead -= replaced
        if grown:
            self._drop_without_handles()
        for tracked in self:
            tracked.whole = grown.get(tracked.whole, tracked.whole)
            now = tuple(engine for engine in tracked.whole if engine in alive | replaced)
            if now != tracked.key[0] and now not in self._teams and not alive.isdisjoint(tracked.key[0]):
                self._move(tracked, now, takes_over=bool(grown))
        unlike: list[DistributedValues] = []
        for key, tracked in list(self._teams.items()):
            if replaced.isdisjoint(key):
                continue
            kept = [replica for replica, engine in enumerate(key) if engine in alive]
            if not kept:
                tracked.end()
                del self._teams[key]
                continue
            lost = [replica for replica, engine in enumerate(key) if engine in replaced]
            unlike += self._restore(tracked, kept[0], lost)
        return unlike

    def _restore(self, tracked: TrackedObjects, survivor: int, new: Sequence[int]) -> list[DistributedValues]:
        """Copy objects to new replicas. Return the handles of mirrored objects that some of these never had."""
        handles = tracked.handles()
        states = [state_of_handle(handle) for handle in handles if isinstance(handle, Mirrored)]
        mirrored = tuple(state.identity for state in states if not state.divided)
        tracked.resend_all()  # the new processes have nothing
        restored = self._operations.restore(tracked, survivor, new, mirrored)
        self._operations.bind_again(tracked)
        unlike: list[DistributedValues] = []
        for handle in handles:
            state = state_of_handle(handle)
            if state.identity in restored:
                state.restored(new, survivor)
                continue
            state.gone.update(tracked.key[0][replica] for replica in new if replica in state.facts)
            if isinstance(handle, Mirrored) and not state.facts.keys() >= set(new):
                change_kind(handle, mirrored=False)
                unlike.append(handle)
        return unlike

    # -- another number of engines -------------------------------------------------------------------------------------

    def check_change(self, leaving: Collection[int], grown: Grown) -> None:
        """Check that a change of the engines keeps all teams apart.

        Raises:
            OptionError: Two teams with objects would consist of the same engines.
        """
        targets: dict[tuple[int, ...], TrackedObjects] = {}
        for tracked in filter(TrackedObjects.handles, self):
            target = tuple(each for each in grown.get(tracked.whole, tracked.whole) if each not in leaving)
            if target and target in targets:
                names = [self.names(each.handles()) or "unnamed objects" for each in (targets[target], tracked)]
                raise OptionError(
                    f"Two strategies would then run on the same engines, {', '.join(map(str, target))}, and each has "
                    f"objects of its own: {names[0]}; and {names[1]}. Delete the objects of one of them first (`del "
                    "model`)."
                )
            targets[target] = tracked

    def settle(
        self,
        leaving: Collection[int],
        grown: Grown,
        strategies: Mapping[tuple[int, ...], Sequence[StrategySpec]],
    ) -> None:
        """Prepare the teams that lose or gain engines. Nothing has changed if this raises.

        Args:
            leaving: The engines that leave the cluster.
            grown: See `engines_replaced`.
            strategies: The strategies that run on the whole of each team.
        """
        leaving_set = set(leaving)
        for tracked in filter(TrackedObjects.handles, self):
            self.drop_dead_engines(tracked)
            gone = [replica for replica, engine in enumerate(tracked.key[0]) if engine in leaving]
            changes = tracked.whole in grown or not leaving_set.isdisjoint(tracked.whole)
            if changes and len(gone) < tracked.size:
                tracked.common = self._operations.settle(tracked, gone, strategies.get(tracked.whole, ()))

    def engines_removed(self, engines: Iterable[int], *, settled: bool) -> str:
        """Note engines that leave the cluster, and return the names of the values that are lost with them.

        Args:
            engines: The engines.
            settled: Whether `settle` was called for this change, so that the remaining replicas take parts over.
        """
        leaving = set(engines)
        self._drop_without_handles()
        lost: list[DistributedValues] = []
        for tracked in self:
            before = tracked.key[0]
            now = tuple(engine for engine in before if engine not in leaving)
            tracked.whole = tuple(engine for engine in tracked.whole if engine not in leaving)
            lost += [handle for handle in tracked.handles() if _loses(handle, leaving)]
            if not now:
                tracked.end()
                del self._teams[before]
            elif now != before:
                self._move(tracked, now, takes_over=settled)
            for handle in tracked.handles():
                state_of_handle(handle).forget(leaving)
        self._dead -= leaving
        return self.names(lost)

    def _drop_without_handles(self) -> None:
        """Drop the teams of which the notebook has no handle. Whatever else they have is sent again."""
        for key, tracked in list(self._teams.items()):
            if not tracked.handles():
                self._operations.rename([engine for engine in key if engine not in self._dead], tracked.key, None)
                tracked.end()
                del self._teams[key]

    def names(self, handles: Iterable[DistributedValues]) -> str:
        """Return the names that the notebook has bound to some of these handles, as text."""
        named = (self._operations.name_of(state_of_handle(handle)) for handle in handles)
        return ", ".join(f"`{name}`" for name in sorted(set(filter(None, named))))

    def close(self) -> None:
        """End all teams when the cluster ends."""
        for tracked in self:
            tracked.end()
        self._teams.clear()


def _loses(handle: DistributedValues, leaving: Collection[int]) -> bool:
    """Return whether a value loses components with some engines that the remaining ones do not have, too."""
    state = state_of_handle(handle)
    engines = state.tracked.key[0]
    is_common = isinstance(handle, Mirrored) or state.identity in state.tracked.common
    if is_common and any(engine not in leaving for engine in engines):
        return False
    here = {engines[replica] for replica in (*state.facts, *state.local)} | state.apart.keys()
    return not here.isdisjoint(leaving)
