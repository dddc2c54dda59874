"""The tracked objects of each team, across the deaths and replacements of engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from distnb.errors import DistnbError, EngineDied, OptionError
from distnb.notebook.doubts import doubt
from distnb.notebook.handles.handle import change_kind, state_of_handle
from distnb.notebook.namespace.handle_operations import CommonObjects, HandleOperations
from distnb.notebook.namespace.tracked_objects import TrackedObjects
from distnb.options import StrategySpec
from distnb.topology import Team
from distnb.values import DistributedValues, Mirrored
from distnb.wire.exchange import TeamKey
from distnb.wire.messages import ObjectId

__all__ = ["Grown", "TrackedTeams"]

Grown = Mapping[tuple[int, ...], tuple[int, ...]]
"""The engines of each team that gains some, by its engines so far."""


class TrackedTeams:
    """The tracked objects of each team that a strategy has used. Iterating uses a copy of the list.

    A team is identified by the engines that its strategies have if none has ended (`TeamKey.whole`). So two strategies
    keep their own objects, even if one of them has lost engines and runs on the other's.

    Engines may end at any moment, and the replicas of a team are then numbered again. While a team changes, its
    replicas are therefore identified by their engines.
    """

    def __init__(self, operations: HandleOperations, make: Callable[[TeamKey], TrackedObjects]) -> None:
        self._operations = operations
        self._make = make
        self._teams: dict[tuple[int, ...], TrackedObjects] = {}
        self._dead: set[int] = set()
        self._incomplete: set[int] = set()  # new engines, from the first step of copying objects to them to the last
        self._saved: dict[tuple[int, ...], CommonObjects] = {}  # by team, while its engines have ended for lack of use
        self._formed = itertools.count(1)

    def __iter__(self) -> Iterator[TrackedObjects]:
        return iter(list(self._teams.values()))

    def of(self, team: Team) -> TrackedObjects:
        """Return the tracked objects of a team that has run a program."""
        whole = team.whole or team.engines
        tracked = self._teams.get(whole)
        if tracked is None:
            tracked = self._teams[whole] = self._make(TeamKey(team.engines, next(self._formed), whole))
        return tracked

    def next_of(self, team: Team) -> TrackedObjects:
        """Return the tracked objects of a team that is about to run a program. It continues with the team's engines."""
        tracked = self.of(team)
        if set(team.engines) < set(tracked.key.engines):
            self._change(tracked, team.engines, tracked.key.whole)
        return tracked

    def continue_from(self, formed: int) -> None:
        """Assign numbers to the changes of teams after those of an earlier notebook."""
        self._formed = itertools.count(formed + 1)

    def adopt(self, key: TeamKey, engines: Iterable[int]) -> TrackedObjects:
        """Continue a team of an earlier notebook under the key that its engines know.

        `engines` are those of the cluster. If that notebook ended during a resize, the team may have others.
        """
        there = set(engines)
        tracked = self._teams[key.whole] = self._make(key)
        whole = tuple(engine for engine in key.whole if engine in there)
        if whole != key.whole:
            self._change(tracked, tuple(engine for engine in key.engines if engine in there), whole)
        self.drop_dead_engines(tracked)
        return tracked

    def engine_died(self, engine: int) -> None:
        """Note that an engine's process has ended, from any thread."""
        self._dead.add(engine)
        doubt()

    def drop_dead_engines(self, tracked: TrackedObjects) -> bool:
        """Continue a team with its living engines, if it has lost some and not all. Return whether it has."""
        engines = tracked.key.engines
        living = tuple(engine for engine in engines if engine not in self._dead)
        if living == engines or not living:
            return False
        self._change(tracked, living, tracked.key.whole)
        return True

    def _change(
        self, tracked: TrackedObjects, engines: tuple[int, ...], whole: tuple[int, ...], *, inherits: bool = False
    ) -> None:
        """Continue a team with other engines. Those that stay keep its objects."""
        old, new = tracked.key, TeamKey(engines, next(self._formed), whole)
        try:
            staying = [engine for engine in old.engines if engine in engines and engine not in self._dead]
            self._operations.rename(staying, old, new, inherits=inherits)
        finally:
            self._teams = {key: each for key, each in self._teams.items() if each is not tracked} | {whole: tracked}
            tracked.move(new)

    def engines_replaced(
        self, engines: Iterable[int], survivors: Iterable[int], grown: Grown = MappingProxyType({})
    ) -> list[DistributedValues]:
        """Note new processes, of replaced engines or of further ones, and copy objects to them from a survivor.

        The last step is `divide`.

        Args:
            engines: The engines with new processes.
            survivors: The engines that kept their processes.
            grown: The engines of each team that gains some, by its engines so far.

        Returns:
            The handles of objects that were mirrored, and could not be copied to further engines.
        """
        replaced, alive = set(engines), set(survivors)
        self._dead -= replaced
        self._incomplete |= replaced
        self._operations.mark_copying(replaced, copying=True)
        if grown:
            self._drop_without_handles()
        unlike: list[DistributedValues] = []
        for tracked in self:
            revived = self._revive(tracked, replaced)
            whole = grown.get(tracked.key.whole, tracked.key.whole)
            now = tuple(engine for engine in whole if engine in alive | replaced)
            if now != tracked.key.engines and not (alive | revived).isdisjoint(tracked.key.engines):
                self._change(tracked, now, whole, inherits=bool(grown))
            if not replaced.isdisjoint(tracked.key.engines):
                unlike += self._restore(tracked, alive | revived, replaced - revived)
        return unlike

    def save(self, strategies: Mapping[tuple[int, ...], Sequence[StrategySpec]]) -> str:
        """Copy what the replicas of each team have in common, since all engines are about to end.

        Each team becomes smaller until its first replica has everything, and `engines_replaced` begins with that one.
        If this raises, nothing has changed.

        Args:
            strategies: The strategies that run on the whole of each team.

        Returns:
            The names of the values that are lost with the engines.
        """
        self._drop_without_handles()
        teams = list(self)
        for tracked in teams:
            self.drop_dead_engines(tracked)
            self._operations.settle(tracked, range(1, tracked.size), strategies.get(tracked.key.whole, ()))
        lost: list[DistributedValues] = []
        for tracked in teams:
            kept: set[ObjectId] = set()
            if not tracked.has_shards:  # shards are not copied
                with suppress(DistnbError, KeyboardInterrupt):
                    self._change(tracked, tracked.key.engines[:1], tracked.key.whole, inherits=True)
                    copied = self._saved[tracked.key.whole] = self._operations.save(tracked, _mirrored(tracked))
                    kept.update(copied.objects)
            for handle in tracked.handles():
                state = state_of_handle(handle)
                lost += [handle] if state.facts and state.identity not in kept else []
        return self.names(lost)

    def _revive(self, tracked: TrackedObjects, replaced: Collection[int]) -> set[int]:
        """Give the first replica of a team what `save` has copied, if its engine is new. Return the engine."""
        saved, engine = self._saved.get(tracked.key.whole), tracked.key.engines[0]
        if saved is None or engine not in replaced:
            return set()
        tracked.resend_all()
        restored = self._operations.revive(tracked, saved)
        self._operations.settle(tracked, (), ())  # forms a group, in which the objects are registered
        for handle in tracked.handles():
            state = state_of_handle(handle)
            if state.identity in restored:
                state.restored((0,), 0)
            elif state.facts:
                state.gone.add(engine)
        del self._saved[tracked.key.whole]
        return {engine}

    def _restore(
        self, tracked: TrackedObjects, survivors: Collection[int], replaced: Collection[int]
    ) -> list[DistributedValues]:
        """Copy objects to new engines. Return the handles of mirrored objects that some of these never had.

        If one of the other engines ends meanwhile, the copying begins again without it.

        Raises:
            EngineDied: A new engine has ended.
        """
        handles = tracked.handles()
        while True:
            if lost := self._dead.intersection(replaced, tracked.key.engines):
                raise EngineDied(f"Engine {min(lost)} ended while objects were copied to it.")
            self.drop_dead_engines(tracked)
            source = next((each for each in tracked.key.engines if each in survivors and each not in self._dead), None)
            if source is None:
                tracked.end()
                del self._teams[tracked.key.whole]
                return []
            living = tracked.key.engines
            new = [engine for engine in living if engine in replaced]
            tracked.resend_all()  # the new processes have nothing
            try:
                restored = self._operations.restore(tracked, source, new, _mirrored(tracked))
                self._operations.bind_again(tracked)
            except EngineDied:
                if not self._dead.isdisjoint(new) or self._dead.isdisjoint(living):
                    raise
            else:
                break
        unlike: list[DistributedValues] = []
        replicas = [tracked.key.engines.index(engine) for engine in new]
        for handle in handles:
            state = state_of_handle(handle)
            if state.identity in restored:
                state.restored(replicas, tracked.key.engines.index(source))
                continue
            state.gone.update(engine for engine, replica in zip(new, replicas, strict=True) if replica in state.facts)
            if isinstance(handle, Mirrored) and not state.facts.keys() >= set(replicas):
                change_kind(handle, mirrored=False)
                unlike.append(handle)
        return unlike

    # -- another number of engines -------------------------------------------------------------------------------------

    def check_change(
        self,
        leaving: Collection[int],
        grown: Grown,
        strategies: Mapping[tuple[int, ...], Sequence[StrategySpec]],
    ) -> None:
        """Check that a change of the engines keeps all teams apart, and that their models can be divided.

        Args:
            leaving: The engines that leave the cluster.
            grown: See `engines_replaced`.
            strategies: The strategies that run on the whole of each team.

        Raises:
            OptionError: Two teams with objects would consist of the same engines, or a number of replicas cannot be
                divided into groups that hold a whole model.
        """
        targets: dict[tuple[int, ...], TrackedObjects] = {}
        for tracked in filter(TrackedObjects.handles, self):
            whole = tracked.key.whole
            target = tuple(each for each in grown.get(whole, whole) if each not in leaving)
            if target and target in targets:
                names = [self.names(each.handles()) or "unnamed objects" for each in (targets[target], tracked)]
                raise OptionError(
                    f"Two strategies would then run on the same engines, {', '.join(map(str, target))}, and each has "
                    f"objects of its own: {names[0]}; and {names[1]}. Delete the objects of one of them first (`del "
                    "model`)."
                )
            targets[target] = tracked
            divided = [handle for handle in tracked.handles() if state_of_handle(handle).divided]
            per_group = [spec.option("replicas_per_group", 1) for spec in strategies.get(whole, ())]
            if divided and (unfit := [each for each in per_group if len(target) % each]):
                raise OptionError(
                    f"{len(target)} replicas cannot be divided into groups of {unfit[0]}, which "
                    f"replicas_per_group={unfit[0]} asks for, and {self.names(divided) or 'unnamed objects'} would be "
                    "lost. Give another size, or delete these objects first (`del model`)."
                )

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
            gone = [replica for replica, engine in enumerate(tracked.key.engines) if engine in leaving]
            changes = tracked.key.whole in grown or not leaving_set.isdisjoint(tracked.key.whole)
            if changes and len(gone) < tracked.size:
                self._operations.settle(tracked, gone, strategies.get(tracked.key.whole, ()))

    def divide(self) -> None:
        """Divide the shards of the teams whose engines have changed again. New engines then have all that they get."""
        for tracked in self:
            has_shards, tracked.has_shards = tracked.has_shards, False
            if has_shards and not tracked.ended:
                self.drop_dead_engines(tracked)
                self._operations.divide(tracked)
        self._operations.mark_copying(self._incomplete, copying=False)
        self._incomplete.clear()

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
            before = tracked.key
            now = tuple(engine for engine in before.engines if engine not in leaving)
            whole = tuple(engine for engine in before.whole if engine not in leaving)
            lost += [handle for handle in tracked.handles() if _loses(handle, leaving)]
            if not now:
                tracked.end()
                del self._teams[before.whole]
            elif (now, whole) != (before.engines, before.whole):
                self._change(tracked, now, whole, inherits=settled)
            for handle in tracked.handles():
                state_of_handle(handle).forget(leaving)
        self._dead -= leaving
        self._incomplete -= leaving
        return self.names(lost)

    def _drop_without_handles(self) -> None:
        """Drop the teams of which the notebook has no handle. Whatever else they have is sent again."""
        for tracked in self:
            if not tracked.handles():
                living = [engine for engine in tracked.key.engines if engine not in self._dead]
                self._operations.rename(living, tracked.key, None)
                tracked.end()
                del self._teams[tracked.key.whole]

    def names(self, handles: Iterable[DistributedValues]) -> str:
        """Return the names that the notebook has bound to some of these handles, as text."""
        named = (self._operations.name_of(state_of_handle(handle)) for handle in handles)
        return ", ".join(f"`{name}`" for name in sorted(set(filter(None, named))))

    def close(self) -> None:
        """End all teams when the cluster ends."""
        for tracked in self:
            tracked.end()
        self._teams.clear()


def _mirrored(tracked: TrackedObjects) -> tuple[ObjectId, ...]:
    """Return the ids of the mirrored objects of which each replica of a team has the whole."""
    states = [state_of_handle(handle) for handle in tracked.handles() if isinstance(handle, Mirrored)]
    return tuple(state.identity for state in states if not state.divided)


def _loses(handle: DistributedValues, leaving: Collection[int]) -> bool:
    """Return whether a value loses components with some engines that the remaining ones do not have, too."""
    state = state_of_handle(handle)
    engines = state.tracked.key.engines
    is_common = isinstance(handle, Mirrored) or state.identity in state.tracked.common
    if is_common and any(engine not in leaving for engine in engines):
        return False
    here = {engines[replica] for replica in (*state.facts, *state.local)} | state.apart.keys()
    return not here.isdisjoint(leaving)
