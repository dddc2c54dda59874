"""Connecting to engines that stayed when another notebook ended: their programs, and then their names.

First the engines introduce themselves, each with the state that it is in. An engine may still run a program. Then its
output from the program's beginning is shown, and the notebook waits for its end. Finally every engine describes all
that it has, and the notebook binds the names as it does after a cell.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from distnb.detached.protocol import Restore, ShowKept
from distnb.detached.saved_names import SavedNames
from distnb.errors import ClusterError, ReplicaStuck
from distnb.notebook.engines import Engines
from distnb.notebook.handles.handle import HANDLES, change_kind, state_of_handle
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.namespace.user_names import user_names
from distnb.notebook.session_part import Ask
from distnb.topology import Team
from distnb.values import Mirrored
from distnb.wire.exchange import TeamKey
from distnb.wire.messages import EngineState, Hello, Status

__all__ = ["Restored", "resume"]

_HELLOS_S = 60.0
_FLUSH_S = 10.0
_POLL_S = 0.02
_OF_NEW_ENGINE = EngineState(program=0, engines=(), unseen=0, kept=0, running=False, serial=0, generation=0, teams=())


@dataclass(frozen=True)
class Restored:
    """The names that are bound again, and those that are not.

    Attributes:
        mirrored, per_replica: The names of handles.
        data: The names of values that were sent: data, functions, modules.
        kept: The names that this notebook had already, and that were not bound.
        lost: The names whose values were in the earlier notebook only.
    """

    mirrored: tuple[str, ...] = ()
    per_replica: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = {
            "Mirrored": self.mirrored,
            "Per replica": self.per_replica,
            "Data, functions and modules, as the engines had them last": self.data,
            "Already defined in this notebook, and not changed": self.kept,
            "Not restored, since their values were in the notebook's process": self.lost,
        }
        lines = [f"{what}: {', '.join(names)}." for what, names in parts.items() if names]
        return "\n".join(lines) or "No names were bound to objects of the engines."


def resume(engines: Engines, namespace: NotebookNamespace, ask: Ask, on_progress: Callable[[str], None]) -> Restored:
    """Wait for programs that still run, show their output, and bind the names of the earlier notebook."""
    namespace.most_nbytes = engines.owner.facts.data_limit_nbytes
    return _restore_names(engines, namespace, ask, _resume_programs(engines, on_progress))


def _resume_programs(engines: Engines, on_progress: Callable[[str], None]) -> dict[int, EngineState]:
    """Wait until every engine is idle, and show the output of the programs that the earlier notebook did not see end.

    Returns:
        The state of each engine then.

    Raises:
        ClusterError: An engine does not answer, or does not end its program.
    """
    supervisor, dispatch = engines.supervisor, engines.dispatch
    states = _states(engines, on_progress)
    dispatch.continue_from(max((state.program for state in states.values()), default=0))
    used = {spec for state in states.values() for spec in state.strategies}
    engines.teams.continue_from(max((state.generation for state in states.values()), default=0), used)
    # A program is followed from here on as if it had been sent from here: an error on one engine ends it on the others.
    seen = SavedNames.load(engines.cluster.directory).program
    first_unseen = {engine: _first_unseen(state, seen) for engine, state in states.items()}
    unseen = {number for number in first_unseen.values() if number}
    unseen |= {state.program for engine, state in states.items() if first_unseen[engine]}
    programs = sorted(unseen)
    members = {
        number: next(state.engines for state in states.values() if state.program >= number and state.engines)
        for number in programs
    }
    for number in programs:
        supervisor.program_began(number, [engine for engine in members[number] if engine in states])
    team = None
    if programs:
        on_progress("waiting for the program that was running")
        team = engines.team_of([engine for engine in members[programs[-1]] if engine in states])
        supervisor.publish(Status(program=programs[-1], state="started", team=team))
    for engine in states:
        supervisor.send(engine, ShowKept(first_unseen[engine]))

    errors: dict[int, Any] = {}
    idle_states: dict[int, EngineState] = {}

    def idle(hello: Hello) -> None:
        idle_states[hello.engine] = state = hello.state or _OF_NEW_ENGINE
        if state.error is not None and state.program in programs:
            errors[hello.engine] = error = state.error
            supervisor.failed(hello.engine, state.program, f"{error.type_name}: {error.text}")
        for number in programs:
            if hello.engine not in members[number]:
                continue
            if state.program < number:
                supervisor.failed(hello.engine, number, "its notebook ended before the program was sent to it")
            elif state.error is None or state.program > number:
                supervisor.replied(hello.engine, number)

    dispatch.await_idle(states, programs, idle, lambda: set(engines.ids) - set(engines.left))
    if team is not None:
        supervisor.await_flush(states, _FLUSH_S)  # the output comes on another channel than the news of the end
        supervisor.publish(Status(program=programs[-1], state="ended", team=team, text="failed" if errors else ""))
    if supervisor.stuck:
        numbers = ", ".join(map(str, sorted(supervisor.stuck)))
        raise ReplicaStuck(
            f"Engine {numbers} is still busy with a program that was ended. Wait, and connect again; or end the "
            "cluster (distnb stop NAME in a terminal)."
        )
    _show_errors(errors, team)
    return idle_states


def _states(engines: Engines, on_progress: Callable[[str], None]) -> dict[int, EngineState]:
    """Wait for the introductions of all engines that run."""
    deadline = time.monotonic() + _HELLOS_S
    while missing := [engine for engine in engines.left if engine not in engines.supervisor.hellos]:
        if time.monotonic() > deadline:
            numbers = ", ".join(map(str, missing))
            raise ClusterError(
                f"Engine {numbers} was silent for {_HELLOS_S:.0f} s: native code may hold Python's "
                "lock. Connect again later; or end the cluster (distnb stop NAME in a terminal)."
            )
        on_progress(f"waiting for engines {', '.join(map(str, missing))}")
        time.sleep(_POLL_S)
    hellos = engines.supervisor.hellos
    return {engine: hellos[engine].state or _OF_NEW_ENGINE for engine in engines.left}


def _first_unseen(state: EngineState, seen: int) -> int:
    """Return the first program of an engine whose end the earlier notebook did not see; 0 if there is none.

    A program may have ended before the engine noticed the end of the notebook. `seen` is the latest program whose end
    the notebook has recorded.
    """
    return state.unseen or (state.kept if state.kept > seen else 0)


def _show_errors(errors: Mapping[int, Any], team: Team | None) -> None:
    """Print the error of a program that failed while no notebook was connected, as a replica reported it first."""
    for engine, report in errors.items():
        member = team is not None and engine in team.engines
        place = f"replica {team.rank_of(engine)}" if team is not None and member else f"engine {engine}"
        print(f"distnb: the program that was running failed on {place}:", file=sys.stderr)
        print("\n".join(report.traceback) or f"{report.type_name}: {report.text}", file=sys.stderr)
        break


def _restore_names(
    engines: Engines, namespace: NotebookNamespace, ask: Ask, idle_states: Mapping[int, EngineState]
) -> Restored:
    """Bind the names of the earlier notebook, except those that this one has.

    Args:
        idle_states: The result of `_resume_programs`. If the earlier notebook ended while it sent a program, only some
            of the engines received it, and it was ended there. Then the random states are those of the others, so that
            the program can be repeated with the same numbers.
    """
    states = {engine: idle_states[engine] for engine in engines.left if engine in idle_states}
    saved = SavedNames.load(engines.cluster.directory)
    before = {name for name in user_names(namespace.user_ns) if not _is_stale(namespace.user_ns[name])}
    names = {name: each.identity for name, each in saved.bound.items()}
    teams = {engine: set() if state.incomplete else set(state.teams) for engine, state in states.items()}
    _rename_late(namespace, states, teams)
    keys = sorted(set[TeamKey]().union(*teams.values()), key=lambda key: -len(key.engines))
    namespace.continue_from(
        max((state.serial for state in states.values()), default=0), max((key.formed for key in keys), default=0)
    )
    # The notebook may have ended before a new process got a copy of what the others have, or before it got all of it.
    empty = {engine for engine, state in states.items() if state.incomplete or (keys and not teams[engine])}
    for engine in {*engines.ids, *(engine for key in keys for engine in key.engines)} - (states.keys() - empty):
        namespace.engine_died(engine)
    skipped = tuple(before)
    for key in keys:
        alive = [engine for engine in key.engines if engine in states and engine not in empty]
        if not all(key in teams[engine] for engine in alive):
            continue  # the notebook ended while it sent the engines another key
        tracked = namespace.adopt_team(key, engines.ids)
        team_engines = tracked.key.engines
        snapshot = namespace.restoring_snapshot(tracked)
        behind = min(team_engines, key=lambda engine: states[engine].program)
        undone = tuple(
            engine for engine in team_engines if states[engine].program > states[behind].program and states[engine].ran
        )
        order = partial(Restore, snapshot=snapshot, names=names, skipped=skipped, undone=undone)
        replies = ask(team_engines, lambda program, team, order=order: order(program, team))  # type: ignore[misc]
        environment = replies[behind].environment
        results = {engine: reply._replace(environment=environment) for engine, reply in replies.items()}
        namespace.restored(tracked, {team_engines.index(engine): each for engine, each in results.items()})
        skipped = tuple(name for name in user_names(namespace.user_ns) if not _is_stale(namespace.user_ns[name]))
    for name, module in saved.modules.items():
        if name not in before:
            with suppress(Exception):  # importing runs code of any kind
                namespace.user_ns[name] = importlib.import_module(module)
    for name, each in saved.bound.items():
        found = namespace.user_ns.get(name)
        if name in before or not isinstance(found, HANDLES) or isinstance(found, Mirrored) is each.mirrored:
            continue
        change_kind(found, mirrored=each.mirrored)
    if empty:
        namespace.engines_replaced(empty, states.keys() - empty)
        namespace.divide()
    return _sorted_names(namespace.user_ns, before, saved)


def _rename_late(
    namespace: NotebookNamespace, states: Mapping[int, EngineState], teams: Mapping[int, set[TeamKey]]
) -> None:
    """Rename teams on the engines that the earlier notebook had not notified, and change their keys in `teams`."""
    for old, new, inherits in dict.fromkeys(each for state in states.values() for each in state.renamings):
        late = [engine for engine in new.engines if old in teams.get(engine, ())]
        namespace.operations.rename(late, old, new, inherits=inherits)
        for engine in late:
            teams[engine].remove(old)
            teams[engine].add(new)


def _is_stale(value: Any) -> bool:
    """Return whether a value is a handle from before this notebook was disconnected."""
    return isinstance(value, HANDLES) and state_of_handle(value).tracked.ended


def _sorted_names(user_ns: Mapping[str, Any], before: set[str], saved: SavedNames) -> Restored:
    there = {name for name in user_names(user_ns) if not _is_stale(user_ns[name])}
    new = sorted(there - before)
    handles = [name for name in new if type(user_ns[name]) in HANDLES]
    return Restored(
        mirrored=tuple(name for name in handles if isinstance(user_ns[name], Mirrored)),
        per_replica=tuple(name for name in handles if not isinstance(user_ns[name], Mirrored)),
        data=tuple(name for name in new if name not in handles),
        kept=tuple(sorted(before & saved.bound.keys())),
        lost=tuple(sorted({*saved.bound, *saved.modules, *saved.others} - there)),
    )
