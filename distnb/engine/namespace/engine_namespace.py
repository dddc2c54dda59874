"""The engine's side of the shared namespace, which opens the notebook's snapshots and describes results."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from distnb.engine.namespace.cell_sources import remember_source, remembered
from distnb.engine.namespace.descriptions import Describer
from distnb.engine.namespace.engine_objects import NOT_THERE, EngineObjects, ObjectsOfTeams
from distnb.engine.namespace.imported_modules import ModuleReloader
from distnb.frames import spared
from distnb.objects.code.definitions import is_code
from distnb.objects.constructors import open_module
from distnb.objects.modes.environment import (
    CONTEXTS,
    RESTORED,
    Environment,
    Moment,
    apply_environment,
    capture_environment,
    is_current,
    outside_inference,
)
from distnb.objects.packing import Packed
from distnb.objects.placeholder import Placeholder
from distnb.runtime.randomness import streams
from distnb.wire.described_values import RETURNED, Leaf, Result, as_object, name_of_given
from distnb.wire.exchange import HeldArgument, NamedArgument, Snapshot, Surroundings, TeamKey, Upkeep, former
from distnb.wire.messages import ObjectId

__all__ = ["EngineNamespace"]

# Names that are not the user's. torch.compile adds the last ones to the globals of a compiled function.
_HIDDEN = re.compile(
    r"_+|_i+|_\d+|_i\d+|_[od]h|In|Out|exit|quit|open|get_ipython|__\w+__|__(compiled_fn|resume_at|import|builtins_dict)_\w+"
)
_SHOWN = frozenset({"_", "__all__", "__annotations__"})


@dataclass
class Mark:
    """The state of the namespace when a program began."""

    before: dict[str, Any]
    snapshot: Snapshot
    environment: Environment


class EngineNamespace:
    """The engine's user namespace, kept equal to the notebook's as far as programs read it.

    Args:
        user_ns: The engine's one namespace.
        teams: The engine's objects.
        engine: This engine's id. Its position among a team's engines is its replica number.
        reserved: The names that the engine itself binds before a program runs.
    """

    def __init__(
        self,
        user_ns: dict[str, Any],
        teams: ObjectsOfTeams,
        *,
        engine: int | None = None,
        reserved: Iterable[str] = (),
    ) -> None:
        self.user_ns = user_ns
        self.teams = teams
        teams.user_ns = user_ns
        self._engine = engine
        self._reserved = frozenset(reserved)
        self._environment: Environment | None = None
        self._modules = ModuleReloader()
        self._arguments: Any = None
        self._call: Mark | None = None
        self._moment: Moment = "end"
        # The snapshot of the next program, kept between the calls of `open` and `begin`.
        self._snapshot: Snapshot | None = None

    def replica_in(self, key: TeamKey) -> int:
        """Return this engine's replica number in a team."""
        return key.engines.index(self._engine) if self._engine in key.engines else self.teams.of(key).replica

    # -- before a program ----------------------------------------------------------------------------------------------

    def open(self, snapshot: Snapshot, replica: int) -> None:
        """Apply a snapshot to the namespace. Call this before `begin`, in the order of the snapshots."""
        self._call, self._moment = None, "end"
        objects = self.teams.of(snapshot.team)
        objects.replica = replica
        self.teams.program_begins(snapshot.serial)
        torch.clear_autocast_cache()  # values that were cast in an earlier program may be out of date
        changes_nothing = snapshot.changes_nothing
        if changes_nothing and objects.tracker.is_settled:
            if snapshot.upkeep is not None:
                objects.release(snapshot.upkeep.release)
        else:
            self._apply_upkeep(objects, snapshot.upkeep or Upkeep())
        self._arguments, self._snapshot = None, snapshot
        if changes_nothing and snapshot.arguments is None:
            return
        environment, sources, modules = snapshot.surroundings or Surroundings()
        if environment is not None:
            environment = environment.on(self.teams.place)
            apply_environment(environment, early=True)
        self._modules.follow(modules)
        for filename, (text, label) in sources.items():
            remember_source(filename, text, label)
        with outside_inference():
            self._bind(objects, snapshot)
        if environment is not None:
            apply_environment(environment, early=False)
            self._environment = None

    def open_call(self, snapshot: Snapshot, replica: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Open the snapshot of a call, and return its arguments. `close_call` ends the call."""
        self.open(snapshot, replica)
        args, kwargs = self._arguments
        self._arguments, self._moment = None, "call"
        self._call = self.begin("")
        return args, kwargs

    def open_again(self, snapshot: Snapshot, replica: int) -> Mark:
        """Open the snapshot of a planned call, and return the state of the namespace. `close_call` ends the call."""
        self.open(snapshot, replica)
        self._moment = "call"
        self._call = mark = self.begin("")
        return mark

    @spared
    def _apply_upkeep(self, objects: EngineObjects, upkeep: Upkeep) -> None:
        """Apply the notebook's decisions on the results of earlier programs, even if there are none."""
        for identity, what in upkeep.adopt.items():
            if identity in objects.owned:
                # The object may have been sent without agreement of the replicas. It now needs its id, unless it is one
                # of the notebook's own objects.
                found = objects.owned[identity]
                objects.own(identity, found, by_value=objects.tracker.number_of(found) is not None)
            elif isinstance(what, str):
                if what in objects.tracker:
                    objects.own(identity, objects.tracker.root(what))
            elif objects.replica in what:
                given = what[objects.replica]
                with contextlib.suppress(KeyError):  # an engine that was replaced meanwhile does not have the object
                    found = objects.tracker.find(given) if isinstance(given, int) else objects.owned[given]
                    objects.own(identity, found)
        objects.tracker.settle(upkeep.unlike_parts)
        objects.tracker.retire_numbers(upkeep.unlike_parts)
        for old, new in upkeep.renamed.items():
            objects.tracker.rename(old, new)
        objects.tracker.forget(upkeep.forget)
        if upkeep.fresh:
            objects.tracker.clear()
            objects.plain.clear()
        objects.release(upkeep.release)
        objects.tracker.drop_unreferenced()

    def _bind(self, objects: EngineObjects, snapshot: Snapshot) -> None:
        user_ns, tracker, bindings, pack = self.user_ns, objects.tracker, snapshot.bindings, snapshot.pack
        wanted = frozenset[str]()
        if bindings is not None:
            wanted = frozenset(bindings.names)
            kept = wanted.union(bindings.staying)
            for name in [name for name in user_ns if name not in kept and not self._is_hidden(name)]:
                del user_ns[name]
            for name in objects.plain.keys() - kept:
                del objects.plain[name]
            for name, module in bindings.imports.items():
                user_ns[name] = open_module(module)
            if bindings.plain is not None:
                objects.plain.update(tracker.open_loose(bindings.plain))
        arriving = () if pack is None else pack.names
        for name in wanted.difference(arriving):
            if name in objects.plain:
                self._bind_one(name, objects.plain[name], wanted)
            elif name in tracker:
                self._bind_one(name, tracker.root(name), wanted)
        if pack is not None:
            opening = tracker.opening(pack)
            for name in pack.names:  # code comes first, since opening later values may call it
                self._bind_one(name, opening.load(name), wanted)
            values = tracker.merge(opening)
            tracker.accept(values)
            for name, value in values.items():
                objects.plain.pop(name, None)
                self._bind_one(name, value, wanted)
        if snapshot.arguments is not None:
            given = snapshot.arguments
            args, kwargs = tracker.open_loose(given)["@"] if isinstance(given, Packed) else given
            named = {name: _with_values(value, objects) for name, value in kwargs.items()}
            self._arguments = tuple(_with_values(value, objects) for value in args), named

    def _bind_one(self, name: str, value: Any, wanted: frozenset[str]) -> None:
        if name not in wanted:
            return
        if value is NOT_THERE:
            self.user_ns.pop(name, None)
        else:
            self.user_ns[name] = value

    # -- around a program ----------------------------------------------------------------------------------------------

    def begin(self, source: str) -> Mark:
        """Note the state of the namespace just before a program runs."""
        assert self._snapshot is not None
        snapshot, self._snapshot = self._snapshot, None
        self.teams.of(snapshot.team).gathered = []  # a change of the engines was given up, and the program may train
        if self._environment is None:
            with streams.shared():
                self._environment = capture_environment()
        return Mark(dict(self.user_ns), snapshot, self._environment)

    def leave_contexts(self) -> None:
        """Give the modes that contexts set the values that they had before the program, which was aborted.

        The abort may have struck where a context's `__exit__` began, which then restored nothing.
        """
        if self._environment is not None:
            modes = self._environment.modes
            apply_environment(Environment({name: modes[name] for name in CONTEXTS if name in modes}))

    def note_names(self) -> Callable[[], None]:
        """Note all bindings, and return a function that restores them (see `distnb.runtime.contexts`)."""
        before = dict(self.user_ns)

        def unbind_names() -> None:
            for name in self._assigned(before):
                if name in before:
                    self.user_ns[name] = before[name]
                else:
                    del self.user_ns[name]

        return unbind_names

    def refuse_placeholders(self, mark: Mark) -> None:
        """Raise the error of a placeholder that the program bound to a name, such as a stale handle's.

        A placeholder of one of the notebook's objects is no error: it is sent back as that object.
        """
        tracker = self.teams.of(mark.snapshot.team).tracker
        for name in self._assigned(mark.before):
            value = self.user_ns[name]
            if type(value) is Placeholder and tracker.number_of(value) is None:
                value.refuse()

    def finish(
        self,
        mark: Mark,
        result: Callable[[Describer], Any] | None = None,
        data: Mapping[str, Any] | None = None,
        result_name: str = RETURNED,
    ) -> Result:
        """Describe the effects of a program since `begin`, whether it failed or not.

        Args:
            mark: The state of the namespace that `begin` noted.
            result: Describes the result of a call.
            data: Values that are sent to the notebook like assigned ones, by names that no variable has.
            result_name: The name under which the result is kept.
        """
        snapshot = mark.snapshot
        objects, serial = self.teams.of(snapshot.team), snapshot.serial
        describer = Describer(objects, serial, snapshot.inquiry.most_nbytes)
        assigned = self._assigned(mark.before)
        values = {name: objects.tracker.root(name) for name in snapshot.inquiry.sections if name in objects.tracker}
        for name in assigned:
            if name in objects.tracker:
                objects.tracker.rename(name, former(name, serial))
                if name in values:
                    values[former(name, serial)] = values.pop(name)
        describer.register({name: self.user_ns[name] for name in assigned} | (dict(data) if data else {}))
        for name in describer.sent:
            objects.plain.pop(name, None)
        changed, pack = self._pack(objects, serial, values, describer)
        names = {name: describer.value(self.user_ns[name], name) for name in assigned}
        described = result(describer) if result is not None else None
        handles = {
            identity: describer.object(objects.owned[identity], identity)
            for identity in snapshot.inquiry.handles
            if identity in objects.owned
        }
        deleted = tuple(name for name in mark.before if name not in self.user_ns and not self._is_hidden(name))
        plain = objects.tracker.pack_loose(describer.plain, apart=True) if describer.plain else None
        after = capture_environment(mark.environment, self._moment)
        environment = after.since(mark.environment) if after is not mark.environment else None
        self._environment = after
        return Result(
            serial=serial,
            names=names,
            deleted=deleted,
            changed=changed,
            pack=pack,
            plain=plain,
            fresh=describer.fresh,
            handles=handles,
            environment=environment if environment is not None and environment.modes else None,
            result=described,
            result_name=result_name,
            imported=tuple(name for name in snapshot.inquiry.awaited if name in sys.modules),
        )

    def _pack(
        self, objects: EngineObjects, serial: int, values: dict[str, Any], describer: Describer
    ) -> tuple[dict[str, bytes | None], Packed | None]:
        """Pack the notebook's values that the program changed in place, and the assigned values that are sent.

        Returns:
            The digests of the changed values by name, and the pack.
        """
        tracker, sent = objects.tracker, describer.sent
        if not values and not sent:
            return {}, None
        digests = tracker.digest(values, create=lambda: describer.surveyor)
        values |= digests.classes
        names = tracker.lacking(values, digests)
        changed: dict[str, bytes | None] = {name: digests.by_name[name] for name in names if name in tracker}
        for name in describer.surveyor.overfull.intersection(changed) if changed else ():
            names.remove(name)
            changed[name] = describer.content_digest(values.pop(name))
            describer.surveyor.drop(name)
        if not names and not sent:
            return changed, None
        digests.by_name.update(describer.digests.by_name)
        digests.unordered.update(describer.digests.unordered)
        digests.large.update(describer.digests.large)
        for name, cls in describer.digests.classes.items():
            if name not in values:
                values[name] = cls
                if name not in tracker:
                    names.append(name)
        objects.references.register = describer.register_fresh
        held: dict[str, set[str]] = {}
        try:
            every = {**sent, **values}
            # Code comes first, since opening other values may call it. Values that run no code when they are opened
            # come before those that do, which may fail. Values in which each replica numbers the objects in an order of
            # its own come last, so that objects which others hold, too, have the numbers of the others.
            instances, unordered = describer.surveyor.instances, digests.unordered
            lacking = sorted(
                [*names, *sent],
                key=lambda name: (not is_code(every[name]), name in unordered, bool(instances.get(name))),
            )
            pack = tracker.pack(serial << 1 | 1, every, digests, lacking, held, tentative=True)
        finally:
            objects.references.register = None
        describer.note_held(held)
        describer.describe_fresh()
        # One replica sends the values that are equal on all. All replicas send changed values, to find the differences.
        return changed, pack.bare() if objects.replica and not changed else pack

    def is_unchanged(self, mark: Mark, *, random: bool) -> bool:
        """Return whether a call has changed neither names nor modes. `random`: also torch's random state."""
        before, after = mark.before, self.user_ns
        return (
            len(before) == len(after)
            and all(map(is_, before.values(), after.values()))
            and all(map(is_, before, after))
            and is_current(mark.environment, random=random)
        )

    def has_changed(self, snapshot: Snapshot, names: Iterable[str]) -> bool:
        """Return whether one of the notebook's values of these names was changed in place."""
        objects = self.teams.of(snapshot.team)
        values = {name: objects.tracker.root(name) for name in names if name in objects.tracker}
        describer = Describer(objects, snapshot.serial, snapshot.inquiry.most_nbytes)
        return bool(objects.tracker.lacking(values, objects.tracker.digest(values, create=lambda: describer.surveyor)))

    def close_unchanged(self) -> None:
        """End a call that had no effect but its result."""
        self._call = None

    def close_call(self, result: Any) -> Result:
        """Describe the result and the effects of a call that `open_call` began."""
        if type(result) is Placeholder:
            result.refuse()
        return self.finish_with(lambda describer: describer.tree(result))

    def abandon_call(self) -> Result | None:
        """Describe the effects of a call that raised. Return None if it raised before the end of `open_call`."""
        mark, self._call = self._call, None
        return self.finish(mark) if mark is not None else None

    def finish_with(self, result: Callable[[Describer], Any]) -> Result:
        """End a call that `open_call` began. `result` describes its result."""
        mark, self._call = self._call, None
        assert mark is not None
        return self.finish(mark, result)

    def finish_operation(self, values: list[Any], *, brief: bool = False) -> Result:
        """End an operation on a handle that `open_call` began.

        Data is sent to the notebook like data that a cell assigns, unless the notebook has it. Functions stay here,
        since they are called where the object is.

        Args:
            values: The operation's value in a list, which is empty if there is none.
            brief: True if the value's text is not needed yet.
        """
        mark, self._call = self._call, None
        assert mark is not None
        tracker = self.teams.of(mark.snapshot.team).tracker
        name = name_of_given(mark.snapshot.serial)
        data = {name: value for value in values if tracker.number_of(value) is None and not is_code(value)}  # noqa: B035
        return self.finish(
            mark, lambda describer: [Leaf(describer.value(value, name, brief=brief)) for value in values], data, name
        )

    def restore(
        self, snapshot: Snapshot, replica: int, bound: Mapping[str, ObjectId], skipped: Iterable[str]
    ) -> Result:
        """Describe everything that this engine has, for a notebook that knows nothing of it.

        Args:
            snapshot: A snapshot without values.
            bound: The names that the earlier notebook had bound to engine objects, with the ids of the objects.
            skipped: The names that are not described, since the notebook has them already.
        """
        self.open(snapshot, replica)
        objects = self.teams.of(snapshot.team)
        for name, identity in bound.items():
            if identity in objects.owned:
                self.user_ns[name] = objects.owned[identity]
        mark = self.begin("")
        mark.before = {name: self.user_ns[name] for name in skipped if name in self.user_ns}
        modes = {name: value for name, value in mark.environment.modes.items() if name not in RESTORED}
        mark.environment = Environment(modes, mark.environment.cell)
        result = self.finish(mark)
        kept = {each.identity for described in result.names.values() if (each := as_object(described)) is not None}
        kept |= result.fresh.keys()
        kept |= {(snapshot.serial, name) for name in result.names}  # the notebook's, if the replicas do not agree
        objects.release([identity for identity in objects.owned if identity not in kept])
        return result._replace(sources=remembered)

    def pack_error(self, error: BaseException) -> Packed:
        """Pack an exception with all that it holds. It keeps its class in the notebook."""
        return self.teams.copies().pack_loose({"": error})

    def _assigned(self, before: Mapping[str, Any]) -> list[str]:
        return sorted(
            name
            for name, value in self.user_ns.items()
            if (name not in before or before[name] is not value) and not self._is_hidden(name)
        )

    def _is_hidden(self, name: str) -> bool:
        if name in self._reserved or not isinstance(name, str):
            return True
        return _HIDDEN.fullmatch(name) is not None and name not in _SHOWN


def _with_values(arguments: Any, objects: EngineObjects) -> Any:
    """Return the arguments of a call, with each representative replaced by its value."""
    kind = type(arguments)
    if kind is NamedArgument:
        return objects.tracker.root(arguments.name)
    if kind is HeldArgument:
        return objects.references.resolve(arguments.token)
    if kind is dict:
        return {name: _with_values(value, objects) for name, value in arguments.items()}
    if kind is list:
        return [_with_values(value, objects) for value in arguments]
    if kind is tuple:
        found = tuple(_with_values(value, objects) for value in arguments)
        return found if any(new is not old for new, old in zip(found, arguments, strict=True)) else arguments
    return arguments
