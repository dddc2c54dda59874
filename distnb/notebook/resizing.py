"""Resizing of a running cluster: engines are added, with copies of what the replicas have in common, or removed.

Everything is checked before anything is changed. A failure or an interrupt then leaves the earlier size or the new one:

    grow     1. start the engines             fails: they are ended, and the cluster is as before
             2. settle, rename, copy          fails: the same, after the teams got their earlier names
    shrink   1. settle                        fails: nothing has changed
             2. rename, end the engines       cannot be given up

`settle` prepares the objects on the engines. Notifying the engines of their team's new members (`rename`) makes the
prepared changes, and cannot be interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from distnb.cluster.engine_plan import check_resizable
from distnb.cluster.local.launcher import PlacedEngine
from distnb.errors import DistnbError, OptionError, StartError
from distnb.notebook.engines import Engines
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.namespace.tracked_teams import Grown
from distnb.notebook.session_part import SessionPart
from distnb.topology import Device, Task

__all__ = ["Resized", "Resizing", "checked_size"]


@dataclass(frozen=True)
class Resized:
    """The result of a change of the cluster's size.

    Attributes:
        added: The engines that were added.
        removed: The engines that were removed, including engines that had ended before.
    """

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


def checked_size(n: int | None, workers: int | None, ps: int | None, tasks: Mapping[int, Task]) -> int:
    """Return the wanted number of engines, or of workers in a cluster with parameter servers.

    Raises:
        OptionError: The arguments do not apply to the cluster, or are no valid numbers.
    """
    servers = len({task for task in tasks.values() if not task.computes})
    if not tasks and (workers is not None or ps is not None):
        raise OptionError(
            f"workers={workers}, ps={ps}: this cluster has no parameter servers, and its engines are all alike. Give "
            "their number: %distnb resize 4, or resize(4)."
        )
    if ps is not None and ps != servers:
        raise OptionError(
            f"ps={ps}: the cluster has {servers} parameter server{'s' * (servers != 1)}, and their number is fixed, "
            "because each variable is stored on certain servers. Save a checkpoint, start another cluster (%distnb "
            f"stop, then %distnb start --workers … --ps {ps}), and restore it there. The number of workers can be "
            "resized."
        )
    if n is not None and workers is not None:
        raise OptionError(f"n={n} and workers={workers}: give one of the two, the number of workers.")
    wanted = n if workers is None else workers
    if wanted is None:
        raise OptionError("Give the new number of engines: %distnb resize 4, or resize(4).")
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise OptionError(f"{wanted!r} is no size of a cluster. Give a whole number, 1 or more.")
    return wanted


class Resizing:
    """The change of a session's cluster to another size. The caller holds the turn, and no call is under way.

    Args:
        engines: The engines.
        namespace: The namespace that the notebook and the engines share.
        parts: The session's parts.
        on_progress: Called with a text whenever the start of engines makes progress.
    """

    def __init__(
        self,
        engines: Engines,
        namespace: NotebookNamespace,
        parts: Sequence[SessionPart],
        on_progress: Callable[[str], None],
    ) -> None:
        self._engines = engines
        self._dispatch = engines.dispatch
        self._namespace = namespace
        self._parts = parts
        self._on_progress = on_progress
        self._is_interrupted = False

    def to(self, size: int) -> Resized:
        """Change the size to a number of engines, or of workers. Engines that have ended do not count, and are removed.

        Raises:
            OptionError, StartError, ReplicaStuck: The size cannot be changed. The error says which size the cluster
                has.
        """
        engines = self._engines
        engines.notice_ends()
        units = _units(engines.placed())
        whole = [unit for unit in units if all(each.engine in engines.left for each in unit)]
        broken = _numbers(unit for unit in units if unit not in whole)
        there = [each for unit in whole for each in unit]
        others = [each for each in engines.placed() if not each.computes]  # parameter servers
        self._dispatch.require_ready([each.engine for each in there])
        leaving = _numbers(whole[size:])
        further: list[PlacedEngine] = []
        if size > len(whole):
            with self._kept(len(whole)):
                further, notices = engines.place_further(there + others, size - len(whole), self._on_progress)
            for notice in notices:
                print(f"distnb: {notice}", file=sys.stderr)
        elif leaving:
            check_resizable(there)
        grown: Grown = engines.teams.grown(_devices(there), _devices([*there, *further])) if further else {}
        strategies = engines.teams.strategies(_devices(there))
        self._namespace.check_change({*broken, *leaving}, grown, strategies)
        if broken:
            with self._kept(len(whole)):
                self._settle(there, broken, {})
            self._remove(broken, settled=True)
        if further:
            with self._kept(len(whole)):
                self._add(there, further, grown)
        elif leaving:
            with self._kept(len(whole)):
                self._settle(there, leaving, {})
            self._remove(leaving, settled=True)
        if further or leaving or broken:
            with self._uninterrupted():
                self._on_progress("dividing models over the replicas")
                self._namespace.divide()
        if (further or leaving or broken) and not engines.tasks:  # workers may be busy with closures, for any time
            self._share_cores({each.engine for each in there} - {*leaving})
        if lost := [each.engine for each in [*there, *further] if each.engine not in {*engines.left, *leaving}]:
            ended = ", ".join(map(str, lost))
            print(f"distnb: engine {ended} ended meanwhile. Replace it: %distnb restart --missing", file=sys.stderr)
        if self._is_interrupted:
            print(f"distnb: the interrupt came too late. The cluster has {self._count(size)} now.", file=sys.stderr)
            raise KeyboardInterrupt
        return Resized(added=tuple(each.engine for each in further), removed=(*broken, *leaving))

    def _add(self, there: Sequence[PlacedEngine], further: Sequence[PlacedEngine], grown: Grown) -> None:
        engines, new = self._engines, [each.engine for each in further]
        engines.add(further, self._on_progress)
        with self._uninterrupted():
            try:
                self._on_progress("copying what the replicas have in common")
                self._settle(there, (), grown)
                engines.teams.renew()
                self._namespace.engines_replaced(new, [each.engine for each in there], grown)
                for part in self._parts:
                    part.enlist(new)
                engines.owner.joined()
            except BaseException:
                self._remove(new, settled=False)
                raise

    def _settle(self, there: Sequence[PlacedEngine], leaving: Collection[int], grown: Grown) -> None:
        self._namespace.settle(leaving, grown, self._engines.teams.strategies(_devices(there)))

    def _remove(self, leaving: Sequence[int], *, settled: bool) -> None:
        with self._uninterrupted():
            self._engines.owner.leave(leaving)
            for part in self._parts:
                part.leave(leaving, "was removed")
            self._namespace.engines_removed(leaving, settled=settled)
            self._engines.remove(leaving)
            for part in self._parts:
                part.forget(leaving)

    def _share_cores(self, staying: Collection[int]) -> None:
        """Let the engines that stay share the cores of their machines with another number of engines.

        New ones were started with their share.
        """
        hosts = [each.host for each in self._engines.placed()]
        sharing = {engine: hosts.count(self._engines.cluster.host(engine)) for engine in staying}
        with self._uninterrupted(), suppress(DistnbError):
            self._namespace.operations.share_cores(sharing)

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Return a context in which an interrupt ends only a program that may be ended, and is noted otherwise."""
        with self._dispatch.interrupts as interrupts:
            yield
            self._is_interrupted |= interrupts.pop()

    def _count(self, size: int) -> str:
        return f"{size} {'worker' if self._engines.tasks else 'engine'}{'s' * (size != 1)}"

    @contextmanager
    def _kept(self, size: int) -> Iterator[None]:
        """Return a context for steps whose failure leaves the earlier size. Its errors mention that size."""
        kept = f"The cluster has {self._count(size)}, as before."
        try:
            yield
        except KeyboardInterrupt:
            print(f"distnb: the resize was interrupted. {kept}", file=sys.stderr)
            raise
        except DistnbError as error:
            if type(error) is StartError:
                raise StartError(f"{error}\n{kept}") from error.__cause__
            error.add_note(kept)
            raise


def _units(placed: Sequence[PlacedEngine]) -> list[list[PlacedEngine]]:
    """Return the engines that come and go together, in order: each engine, or the engines of each worker."""
    units: dict[int, list[PlacedEngine]] = {}
    for each in placed:
        if each.computes:
            units.setdefault(each.engine if each.task is None else each.task.index, []).append(each)
    return [units[number] for number in sorted(units)]


def _numbers(units: Iterator[list[PlacedEngine]] | Sequence[list[PlacedEngine]]) -> tuple[int, ...]:
    return tuple(each.engine for unit in units for each in unit)


def _devices(placed: Sequence[PlacedEngine]) -> dict[int, Device]:
    return {each.engine: each.device for each in placed}
