"""Which space belongs to which engines: they die and are replaced, and what the notebook holds there goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from distnb.notebook.handles.handle import state_of_handle
from distnb.notebook.handles.handle_operations import Operations
from distnb.notebook.namespace.notebook_objects import NotebookObjects
from distnb.values import Mirrored
from distnb.wire.exchange import SpaceKey

__all__ = ["ObjectsOfEngines"]


class ObjectsOfEngines:
    """One space for each group of engines that a strategy has used. Iterating gives them as they are at its beginning.

    Args:
        operations: Those of the namespace.
        make: Makes the space of a key.
    """

    def __init__(self, operations: Operations, make: Callable[[SpaceKey], NotebookObjects]) -> None:
        self._operations = operations
        self._make = make
        self._spaces: dict[tuple[int, ...], NotebookObjects] = {}
        self._dead: set[int] = set()
        self._epochs = itertools.count(1)

    def __iter__(self) -> Iterator[NotebookObjects]:
        return iter(list(self._spaces.values()))

    def of(self, engines: tuple[int, ...]) -> NotebookObjects:
        """The space of some engines: that of a larger group whose survivors they are, or a new one."""
        space = self._spaces.get(engines)
        if space is None:
            for other in self:
                if self._lost_some(other) and set(other.key[0]) - self._dead == set(engines):
                    self._move(other, engines)
                    return other
            space = self._spaces[engines] = self._make((engines, next(self._epochs)))
        return space

    def engine_died(self, engine: int) -> None:
        """An engine's process has ended; from any thread."""
        self._dead.add(engine)

    def leave_the_dead(self, space: NotebookObjects) -> None:
        """Let a space go on with the engines of it that live, if some do and some do not."""
        if self._lost_some(space):
            self._move(space, tuple(engine for engine in space.key[0] if engine not in self._dead))

    def _lost_some(self, space: NotebookObjects) -> bool:
        engines = space.key[0]
        return not self._dead.isdisjoint(engines) and not self._dead.issuperset(engines)

    def _move(self, space: NotebookObjects, engines: tuple[int, ...]) -> None:
        """Let a space go on with fewer engines, or with more: those that stay keep its objects."""
        old, new = space.key, (engines, next(self._epochs))
        self._operations.rename(tuple(engine for engine in old[0] if engine in engines), old, new)
        del self._spaces[old[0]]
        self._spaces[engines] = space
        space.move(new)

    def engines_replaced(self, engines: Iterable[int], survivors: Iterable[int]) -> None:
        """New processes have taken the place of some engines. Mirrored objects are restored to them from a survivor.

        Args:
            engines: The replaced ones, up and ready.
            survivors: Engines of the cluster that kept their process.
        """
        replaced, alive = set(engines), set(survivors)
        self._dead -= replaced
        for space in self:
            grown = tuple(engine for engine in space.whole if engine in alive | replaced)
            if grown != space.key[0] and grown not in self._spaces and not alive.isdisjoint(space.key[0]):
                self._move(space, grown)
        for key, space in list(self._spaces.items()):
            if replaced.isdisjoint(key):
                continue
            kept = [replica for replica, engine in enumerate(key) if engine in alive]
            if not kept:
                space.end()
                del self._spaces[key]
                continue
            lost = [replica for replica, engine in enumerate(key) if engine in replaced]
            self._restore(space, kept[0], lost)

    def _restore(self, space: NotebookObjects, survivor: int, lost: Sequence[int]) -> None:
        handles = space.handles()
        mirrored = tuple(state_of_handle(handle).identity for handle in handles if isinstance(handle, Mirrored))
        space.doubt()  # the new processes have nothing
        restored = self._operations.restore(space, survivor, lost, mirrored)
        for handle in handles:
            state = state_of_handle(handle)
            if state.identity in restored:
                state.restored(lost, survivor)
            else:
                state.gone.update(space.key[0][replica] for replica in lost if replica in state.facts)

    def close(self) -> None:
        """The cluster is gone."""
        for space in self:
            space.end()
        self._spaces.clear()
