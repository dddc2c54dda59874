"""The plans of a session's calls, and the next calls by plan."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distnb.notebook.handles.handle import state_of_handle
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.plans.call_plan import CallPlan, UnplannedError
from distnb.options import StrategySpec
from distnb.runtime.this_process import this_process
from distnb.topology import Team
from distnb.wire.exchange import Snapshot, is_bare
from distnb.wire.messages import ObjectId
from distnb.wire.planned import PlannedCall

__all__ = ["CallPlans", "NextCall"]

_MOST = 64


class NextCall(NamedTuple):
    """A call by plan that is about to be sent, and must be."""

    plan: CallPlan
    snapshot: Snapshot
    arguments: Any
    rebound: dict[str, Any]

    def message(self, program: int) -> PlannedCall:
        """Return the message to the engines."""
        upkeep = self.snapshot.upkeep
        return PlannedCall(
            program=program,
            plan=self.plan.program,
            serial=self.snapshot.serial,
            released=upkeep.release if upkeep is not None else (),
            arguments=self.arguments,
            rebound=self.rebound,
        )


class CallPlans:
    """The plans of a session's calls, one for each function, strategy and method.

    An engine keeps twice as many plans, so it has every plan that holds.
    """

    def __init__(self, namespace: NotebookNamespace) -> None:
        self._namespace = namespace
        self._plans: dict[tuple[int, int, str], CallPlan] = {}

    def next_call(
        self,
        spec: StrategySpec,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        changed: Sequence[set[ObjectId]],
    ) -> NextCall | None:
        """Return the next call by plan; None if the call must be packed in the ordinary way.

        Args:
            changed: The ids of the objects that deferred calls change. A call that reads them is not planned.
        """
        fn, given = _parts_of_call(method, args, kwargs)
        if type(fn) is not types.FunctionType:
            return None
        plan = self._plans.get((id(fn.__code__), id(spec), method))
        if plan is None or plan.tracked.may_be_changed:
            return None  # an ordinary call waits for the calls under way that may change the notebook's objects
        rebound = plan.rebound(fn, self._namespace.user_ns)
        if rebound is None:
            return None
        reads: list[ObjectId] = []
        data = plan.named_data(self._namespace.user_ns)
        try:
            arguments = _coded(plan, given, self._namespace.batch, reads, data)
            values = {name: plan.coded(value, None, reads, data) for name, value in rebound.items()} if rebound else {}
        except UnplannedError:
            return None
        if data and not plan.tracked.has(data):
            return None
        if changed and not set().union(*changed).isdisjoint(plan.reads.union(reads)):
            return None
        snapshot = self._namespace.snapshot_again(plan.tracked, plan.inquiry, changing=plan.is_changing)
        if snapshot is None:
            return None
        for name, value in rebound.items():
            plan.tracked.bound.send(name, value)
        if rebound:
            for each in self._plans.values():
                if each.tracked is plan.tracked:
                    each.note_rebound(rebound)
        return NextCall(plan, snapshot, arguments, values)

    def make(
        self,
        program: int,
        spec: StrategySpec,
        team: Team,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        snapshot: Snapshot,
    ) -> bool:
        """Make the plan of a call that was packed in the ordinary way. Return False if it gets none, or has one."""
        fn, given = _parts_of_call(method, args, kwargs)
        is_sent = isinstance(snapshot.arguments, tuple) and _is_inert(snapshot)
        if type(fn) is not types.FunctionType or not is_sent or this_process.before_program is not None:
            return False
        tracked, found = self._namespace.simple_reads()
        is_ours = method == "" and is_bare(fn)
        if found is None or not (is_ours or any(fn is each for each in found.functions)):
            return False
        if not all(state_of_handle(each).is_whole for each in tracked.references.met.values()):
            return False
        key = id(fn.__code__), id(spec), method
        known = self._plans.get(key)
        if known is not None and known.rebound(fn, self._namespace.user_ns) == {}:
            return False
        plan = CallPlan(program, spec, team, tracked, fn, found, snapshot.inquiry, frozenset(tracked.references.met))
        try:
            _coded(plan, given, self._namespace.batch, [], {})
        except UnplannedError:
            return False
        self._plans.pop(key, None)
        if len(self._plans) >= _MOST:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan
        return True


def _parts_of_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the function that a method calls, and its arguments `(args, kwargs)`. Return (None, None) for others."""
    if kwargs:
        return None, None
    if method == "run":
        fn, *given = args
        return fn, given
    return (args[0], (args[1:], {})) if method == "" else (None, None)


def _coded(plan: CallPlan, given: Any, batch: Any, reads: list[ObjectId], data: dict[str, Any]) -> Any:
    args, kwargs = given
    if not (args or kwargs):
        return ()
    named = {name: plan.coded(value, batch, reads, data) for name, value in kwargs.items()} if kwargs else {}
    return tuple([plan.coded(value, batch, reads, data) for value in args]), named


def _is_inert(snapshot: Snapshot) -> bool:
    inquiry = snapshot.inquiry
    return snapshot.sends_nothing and not (inquiry.handles or inquiry.awaited)
