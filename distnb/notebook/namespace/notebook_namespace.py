"""The notebook's side of the shared namespace, which packs snapshots and merges results."""

from __future__ import annotations

import itertools
import linecache
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from distnb.errors import NamespaceError
from distnb.notebook.doubts import doubt
from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.namespace.handle_operations import HandleOperations, Perform
from distnb.notebook.namespace.local_copies import LocalCopies
from distnb.notebook.namespace.module_watch import ModuleWatch
from distnb.notebook.namespace.needs import Needs, SimpleReads
from distnb.notebook.namespace.results import Results
from distnb.notebook.namespace.tracked_objects import MISSING, TrackedObjects
from distnb.notebook.namespace.tracked_teams import Grown, TrackedTeams
from distnb.notebook.namespace.user_names import user_names
from distnb.objects.code.definitions import Classes, is_code, is_simple
from distnb.objects.code.reads import names_read
from distnb.objects.packing import Packed
from distnb.objects.plain import is_plain
from distnb.options import DATA_LIMIT_NBYTES, StrategySpec
from distnb.runtime.this_process import this_process
from distnb.topology import Team
from distnb.values import DistributedValues, Future
from distnb.wire.described_values import Result
from distnb.wire.exchange import HeldArgument, Inquiry, NamedArgument, Snapshot, TeamKey, Upkeep, argument_name, is_bare
from distnb.wire.messages import ObjectId

__all__ = ["NotebookNamespace"]

_LARGE_NBYTES = 50 << 20
_MOST_GIVEN = 16  # the number of values that an object returns before it is described again


class NotebookNamespace:
    """The notebook's side of the namespace that notebook and engines share.

    Args:
        user_ns: The notebook's variables.
        perform: Applies an operation to an engine object on several engines (`ProgramRuns.perform`).
        announce: Shows a notice to the user.

    Attributes:
        most_nbytes: The size above which data stays on the engines.
        stays: Whether the engines stay for another notebook.
        batch: The latest batch of an iteration over a distributed dataset. As an argument of a call, its lists and
            dicts are rebuilt on the replicas, and are not digested.
    """

    def __init__(self, user_ns: dict[str, Any], perform: Perform, announce: Callable[[str], None] = print) -> None:
        self.user_ns = user_ns
        self.most_nbytes = DATA_LIMIT_NBYTES
        self.stays = False
        self.batch: Any = None
        self.operations = HandleOperations(self, perform)
        self._announce = announce
        self._classes = Classes()
        self._teams = TrackedTeams(self.operations, lambda key: TrackedObjects(key, user_ns, self._classes))
        self._serials = itertools.count(1)
        self._modules = ModuleWatch()
        self._latest: tuple[TrackedObjects, Needs]  # of the latest call

    # -- cells ---------------------------------------------------------------------------------------------------------

    def outgoing(self, source: str, team: Team, filename: str = "", label: str = "") -> Snapshot:
        """Return the snapshot of a cell. Call this right before the cell is sent, and send each snapshot.

        Args:
            source: The program's text: the cell's, or a part of it that runs as a program of its own.
            team: The engines that run the program.
            filename, label: The file name of the code objects and the cell's name in tracebacks. Tracebacks show the
                notebook's lines of that file, not those of the source.
        """
        tracked = self._teams.next_of(team)
        reads = names_read(source)
        needs = self._needs(tracked)
        needs.digests.attributes |= reads.attributes
        needs.digests.imports |= reads.imports
        needs.more += sorted({*reads.names, *tracked.bound.rebound(self.user_ns)})
        if reads.dynamic:
            needs.more += sorted(user_names(self.user_ns))
        if filename:
            lines = linecache.getlines(filename)
            needs.own_source = filename, "".join(lines) or source, label
        return self._snapshot(tracked, needs, None, cell=True, assigned=reads.assigned)

    def incoming(self, team: Team, replies: Mapping[int, Result]) -> None:
        """Apply the effects of a cell (`EngineNamespace.finish`, by replica), whether it failed or not."""
        tracked = self._teams.of(team)
        if replies:
            self.apply_call(tracked, replies, with_result=False)
        else:
            for snapshot in list(tracked.outstanding.values()):
                tracked.reject(snapshot)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def outgoing_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], team: Team) -> Snapshot:
        """Return the snapshot of a call of a strategy's method, with its arguments, including functions."""
        return self.call_snapshot(self._teams.next_of(team), (tuple(args), dict(kwargs)))

    def call_snapshot(
        self,
        tracked: TrackedObjects,
        arguments: Any,
        *,
        touched: Sequence[DistributedValues] = (),
        names: Iterable[str] = (),
    ) -> Snapshot:
        """Return the snapshot of a call, or of an operation on `touched` handles, with arguments `(args, kwargs)`.

        It binds the names that the call needs, and further `names`.
        """
        if tracked.ended:
            raise NamespaceError(
                "The engines of this strategy were restarted, stopped or left while it was in use. Run the cell again."
            )
        self._teams.drop_dead_engines(tracked)
        needs = self._needs(tracked)
        self._latest = tracked, needs
        for handle in touched:
            needs.follow_handle(handle)
        needs.more += names
        if arguments is not None:
            arguments = _Arguments(tracked, needs, self.user_ns, self.batch, asked=bool(touched)).replaced(arguments)
        # An object may no longer hold the values that it returned, so it is described again now and then.
        crowded = [state_of_handle(each).identity for each in touched if state_of_handle(each).given > _MOST_GIVEN]
        return self._snapshot(tracked, needs, arguments, cell=False, described=crowded)

    def simple_reads(self) -> tuple[TrackedObjects, SimpleReads | None]:
        """Return the team's objects, and the reads of the call that was packed last; see `Needs.simple_reads`."""
        tracked, needs = self._latest
        return tracked, needs.simple_reads()

    def snapshot_again(self, tracked: TrackedObjects, inquiry: Inquiry, *, changing: bool) -> Snapshot | None:
        """Return the snapshot of a planned call, which must be sent; None if there are changes to report first.

        Args:
            changing: Whether the call may change an object of the notebook's.
        """
        released = tracked.upkeep.take_released()
        if released is None:
            return None
        upkeep = Upkeep(release=released) if released else None
        snapshot = Snapshot(team=tracked.key, serial=next(self._serials), inquiry=inquiry, upkeep=upkeep)
        tracked.note(snapshot, changing=changing)
        return snapshot

    def may_be_changed(self, team: Team) -> bool:
        """Return whether a call under way may change an object of the notebook's in place."""
        return self._teams.of(team).may_be_changed

    def reads(self, team: Team, objects: set[ObjectId]) -> bool:
        """Return whether the call that was packed last reads one of these engine objects."""
        return not objects.isdisjoint(self._teams.of(team).references.met)

    def result(self, team: Team, replies: Mapping[int, Result], changes: int | None = None) -> Any:
        """Return the result of a call from `EngineNamespace.close_call`, by replica. For `changes` see `Results`."""
        return self.apply_call(self._teams.of(team), replies, changes=changes)

    def failed(self, snapshot: Snapshot, replies: Mapping[int, Result] | None = None) -> None:
        """Handle a call that failed, was not sent, or may not have been opened by engines that were given up on.

        Its effects until then (`EngineNamespace.abandon_call`, by replica) are applied, like those of a cell.
        """
        for tracked in self._teams:
            if tracked.key == snapshot.team:
                if replies:
                    self.apply_call(tracked, replies, with_result=False)
                else:
                    tracked.reject(snapshot)

    def apply_call(
        self,
        tracked: TrackedObjects,
        results: Mapping[int, Result],
        *,
        with_result: bool = True,
        changes: int | None = None,
    ) -> Any:
        """Apply the effects of a program, and return its result."""
        snapshot = tracked.outstanding.get(next(iter(results.values())).serial)
        if snapshot is None:  # both sides have forgotten the numbers of objects since it was sent
            results = {replica: one._replace(changed={}, pack=None) for replica, one in results.items()}
        incoming = Results(tracked, self.user_ns, self.operations, results, self._announce, changes, self.most_nbytes)
        try:
            incoming.apply()
            result = incoming.result() if with_result else None
            incoming.release()
        except BaseException:
            if snapshot is not None:
                tracked.reject(snapshot)
            else:
                tracked.resend_all()
            raise
        finally:
            tracked.make_handle = None  # it refers to the results
        if snapshot is not None:
            tracked.outstanding.pop(snapshot.serial, None)
        if len(results) < tracked.size:
            tracked.resend_all()
        self._modules.update()
        return result

    def open_error(self, pack: Packed) -> Any:
        """Open an exception that an engine packed. Its class is the notebook's own."""
        return TrackedObjects(TeamKey((), 0, ()), self.user_ns, self._classes).tracker.open_loose(pack)[""]

    # -- lost and new engines ------------------------------------------------------------------------------------------

    def engine_died(self, engine: int) -> None:
        """Note that an engine's process has ended, from any thread. Later programs use the other engines' objects."""
        self._teams.engine_died(engine)

    def engines_replaced(
        self, engines: Iterable[int], survivors: Iterable[int], grown: Grown = MappingProxyType({})
    ) -> None:
        """Note that some engines have new processes, which are ready. The `survivors` kept their processes.

        `grown` has the engines of each team that gains further ones, by its engines so far.
        """
        unlike = self._teams.engines_replaced(engines, survivors, grown)
        if names := self._teams.names(unlike):
            self._announce(f"distnb: the new replicas do not have {names}, which cannot be copied.")

    def divide(self) -> None:
        """Divide the shards of models over the engines that strategies have now, after their engines have changed."""
        self._teams.divide()

    def check_change(
        self, leaving: Collection[int], grown: Grown, strategies: Mapping[tuple[int, ...], Sequence[StrategySpec]]
    ) -> None:
        """Check that the objects permit a change of the cluster's engines. See `TrackedTeams.check_change`."""
        self._teams.check_change(leaving, grown, strategies)

    def settle(
        self, leaving: Collection[int], grown: Grown, strategies: Mapping[tuple[int, ...], Sequence[StrategySpec]]
    ) -> None:
        """Prepare objects for a change of the engines, which may still be given up. See `TrackedTeams.settle`."""
        self._teams.settle(leaving, grown, strategies)

    def engines_removed(self, engines: Collection[int], *, settled: bool = True) -> None:
        """Note that engines leave the cluster, after `settle`. They are still there, unless they have died."""
        if lost := self._teams.engines_removed(engines, settled=settled):
            numbers = ", ".join(map(str, sorted(engines)))
            self._announce(f"distnb: with engine{'s' * (len(engines) > 1)} {numbers}, components of {lost} are lost.")

    def save(self, strategies: Mapping[tuple[int, ...], Sequence[StrategySpec]]) -> str:
        """Copy what the replicas have in common, since all engines are about to end. See `TrackedTeams.save`."""
        return self._teams.save(strategies)

    def close(self) -> None:
        """Make every handle stale when the cluster ends."""
        self._teams.close()

    # -- engines that another notebook used ----------------------------------------------------------------------------

    def continue_from(self, serial: int, formed: int) -> None:
        """Assign numbers after an earlier notebook's: to snapshots, as parts of the ids of objects, and to teams."""
        self._serials = itertools.count(serial + 1)
        self._teams.continue_from(formed)

    def adopt_team(self, key: TeamKey, engines: Iterable[int]) -> TrackedObjects:
        """Continue a team of an earlier notebook with its living engines. `engines` are those of the cluster."""
        return self._teams.adopt(key, engines)

    def restoring_snapshot(self, tracked: TrackedObjects) -> Snapshot:
        """Return the snapshot of a program that describes all that the engines of an adopted team have."""
        serial = next(self._serials)
        inquiry = Inquiry(most_nbytes=self.most_nbytes)
        snapshot = Snapshot(team=tracked.key, serial=serial, inquiry=inquiry, upkeep=Upkeep(fresh=True))
        tracked.note(snapshot, changing=False)
        return snapshot

    def restored(self, tracked: TrackedObjects, results: Mapping[int, Result]) -> None:
        """Bind what the engines of an adopted team have described, by replica."""
        for filename, text in next(iter(results.values())).sources.items():
            if filename not in linecache.cache:
                linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        self.apply_call(tracked, results, with_result=False)

    # -- the default strategy ------------------------------------------------------------------------------------------

    @contextmanager
    def localise(self, source: str) -> Iterator[tuple[str, ...]]:
        """Bind copies of the mirrored objects that a cell reads, for a cell that runs in the notebook.

        Within the context, names that are bound to handles (also in the notebook's containers and functions that the
        cell reads) hold copies of replica 0's objects, made together. Afterwards they are bound to the handles again,
        unless the cell assigned them. The context's value is the names that hold copies.
        """
        copies = LocalCopies(self.user_ns, self.operations, self._announce)
        names = copies.bind(names_read(source))
        try:
            yield names
        finally:
            copies.unbind()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _snapshot(
        self,
        tracked: TrackedObjects,
        needs: Needs,
        arguments: Any,
        *,
        cell: bool,
        assigned: Collection[str] = (),
        described: Sequence[ObjectId] = (),
    ) -> Snapshot:
        needs.collect()
        if cell:
            handles = (each for each in needs.plain.values() if type(each) in HANDLES)
            described = tuple(
                dict.fromkeys((*(state_of_handle(each).identity for each in handles), *tracked.references.met))
            )
        try:
            return self._make_snapshot(tracked, needs, arguments, cell=cell, assigned=assigned, described=described)
        except BaseException:  # the user's interrupt, or an error of the user's code in pickling
            tracked.resend_all()
            raise

    def _make_snapshot(
        self,
        tracked: TrackedObjects,
        needs: Needs,
        arguments: Any,
        *,
        cell: bool,
        assigned: Collection[str],
        described: Sequence[ObjectId],
    ) -> Snapshot:
        """Make the parts of a snapshot. Each part's owner notes what the engines have from now on.

        The upkeep comes last, since packing the values and binding the names add to it.
        """
        serial = next(self._serials)
        # In the order of opening: code comes first, since opening the other values may need it.
        sections = dict(sorted(needs.sections.items(), key=lambda section: not is_code(section[1])))
        pack = tracked.pack(serial, sections, needs.digests)
        packed = () if pack is None else pack.names
        if pack is not None and pack.nbytes > _LARGE_NBYTES:
            what = ", ".join(f"`{name}`" for name in packed if not name.startswith("@"))
            size = f"{pack.nbytes / 1e6:,.0f} MB to {tracked.size} replica(s)"
            self._announce(f"distnb: sending {size}: {what or 'arguments of a call'}")
        bindings = tracked.bound.bindings(needs, self.user_ns, assigned, packed, cell=cell)
        if this_process.before_program is not None:
            this_process.before_program(needs.modules() if bindings is not None or packed else ())
        modules = {}
        if bindings is not None or any(is_code(sections[name]) for name in packed):
            modules = self._modules.wanted(needs.imported(), needs.digests.attributes)
        snapshot = Snapshot(
            team=tracked.key,
            serial=serial,
            inquiry=Inquiry(
                most_nbytes=self.most_nbytes,
                sections=tuple(sections),
                handles=tuple(described),
                awaited=needs.awaited(),
            ),
            surroundings=tracked.surroundings.changes("beginning" if cell else "call", needs.sources(), modules),
            bindings=bindings,
            pack=pack,
            arguments=arguments if is_bare(arguments) else tracked.tracker.pack_loose({"@": arguments}),
            upkeep=tracked.upkeep.take(),
        )
        tracked.drop_unreferenced()  # reported after this pack, which may refer to memory of these objects
        if cell or described or not snapshot.sends_nothing:
            doubt()
        changing = not all(issubclass(type(value), type) or is_simple(value) for value in sections.values())
        tracked.note(snapshot, changing=changing)
        return snapshot

    def _needs(self, tracked: TrackedObjects) -> Needs:
        """Release the names that the notebook has rebound, and return an empty collection of a program's needs."""
        tracker, user_ns = tracked.tracker, self.user_ns
        rebound = [
            name
            for name in tracker.names
            if name[0] not in "@%" and "#" not in name and user_ns.get(name, MISSING) is not tracker.root(name)
        ]
        tracked.release_names(rebound, next(self._serials))
        return Needs(tracked, user_ns)


class _Arguments:
    """The converter of a call's arguments, which replaces values that are digested and sent one by one by names.

    A function that the notebook has a name for is replaced by that name.

    Args:
        asked: Whether the arguments are those of an operation on a handle. If False, a strategy's method has them.
    """

    def __init__(
        self, tracked: TrackedObjects, needs: Needs, user_ns: Mapping[str, Any], batch: Any, *, asked: bool
    ) -> None:
        self._references = tracked.references
        self._needs = needs
        self._user_ns = user_ns
        self._batch = batch
        self._asked = asked

    def replaced(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return `(args, kwargs)` as they are sent."""
        args, kwargs = arguments
        # The second and third argument of `run` are a tuple and a dict that were created for the call.
        made = not (self._asked or kwargs) and len(args) == 3 and type(args[1]) is tuple and type(args[2]) is dict
        if made:
            own = {name: self._one(value) for name, value in args[2].items()}
            return (self._one(args[0]), tuple(map(self._one, args[1])), own), {}
        return tuple(map(self._one, args)), {name: self._one(value) for name, value in kwargs.items()}

    def _of_batch(self, value: Any) -> Any:
        if type(value) is list:
            return list(map(self._of_batch, value))
        if type(value) is dict:
            return {key: self._of_batch(part) for key, part in value.items()}
        return self._one(value)

    def _one(self, value: Any) -> Any:
        if value is self._batch and type(value) in (list, dict):
            return self._of_batch(value)
        if isinstance(value, Future):
            value.result()  # raises the error of its call
        kind = type(value)
        if isinstance(value, DistributedValues):
            if kind in HANDLES:
                self._needs.follow_handle(value)
            token = self._references.token(value, "own" if self._asked else "argument")
            return value if token is None else HeldArgument(token)
        if is_plain(value):
            return value
        if kind is tuple:
            return tuple(map(self._one, value))
        name = getattr(value, "__name__", "") if kind is types.FunctionType else ""
        if name and self._user_ns.get(name) is value:
            self._needs.more.append(name)
        else:
            name = argument_name(value)
            self._needs.unseen[name] = value
        return NamedArgument(name)
