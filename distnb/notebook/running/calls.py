"""Calls from ordinary cells: methods of a strategy that run on every replica, at once, pipelined or deferred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distnb.notebook.engines import Engines
from distnb.notebook.handles.handle import state_of_handle
from distnb.notebook.handles.pending import DeferredCall, PendingCalls
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.namespace.tracked_objects import MISSING
from distnb.notebook.plans.call_plans import CallPlans, NextCall
from distnb.notebook.plans.quick_results import quick_result
from distnb.notebook.programs.outcome import Outcome
from distnb.notebook.running.program_runs import ProgramRuns
from distnb.options import StrategySpec
from distnb.runtime import step_count
from distnb.topology import Team
from distnb.values import Future
from distnb.wire.exchange import Snapshot
from distnb.wire.messages import CallFunction

__all__ = ["Calls"]


class _Call(NamedTuple):
    """A call under way: its outcome, team and snapshot, and the value of `operations.changes` when it was sent.

    `planned` is the call by plan, if it is one.
    """

    outcome: Outcome
    team: Team
    snapshot: Snapshot
    changes: int
    planned: NextCall | None


class Calls:
    """The calls of a session.

    Attributes:
        latest_strategy: The kind of the strategy of the latest call or cell.
    """

    def __init__(self, engines: Engines, namespace: NotebookNamespace, runs: ProgramRuns) -> None:
        self._engines = engines
        self._dispatch = engines.dispatch
        self._namespace = namespace
        self._runs = runs
        self._pending = PendingCalls()
        self._plans = CallPlans(namespace)
        self._deferred: list[DeferredCall] = []
        self.latest_strategy = ""
        namespace.operations.before = self.send_deferred

    def __bool__(self) -> bool:
        """Return whether calls are under way."""
        return bool(self._pending)

    def call(
        self, spec: StrategySpec, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Any:
        """Call a method of a strategy on every replica, as `strategy.run` does in the notebook.

        Args:
            method: The method's name; "" to call the first argument with the others.
            wait: Whether to wait for the result. If False, a `Future` is returned.

        Returns:
            The replicas' results, regrouped. Tensors and other objects stay on the replicas, behind handles.

        Raises:
            BaseException: The failing replica's own exception; KeyboardInterrupt if the user ended the call.
        """
        with self._dispatch.turn:
            if not (wait and method == "run"):
                self.send_deferred()
            with self._dispatch.interrupts:
                call = self._post(spec, method, args, kwargs)
                if not wait:
                    pending = self._pend(call)
                elif not self._deferred:
                    return self._finish_call(call)
                elif self._namespace.may_be_changed(call.team):  # a deferred call needs the changes of this one
                    result = self._finish_call(call)
                    self.send_deferred(urgent_only=True)
                    return result
                else:
                    self.send_deferred(urgent_only=True)
                    return self._finish_call(call)
            self._pending.keep_few()
            return pending

    def defer(self, spec: StrategySpec, ask: Callable[[], Sequence[Any]], changed: Sequence[Any]) -> DeferredCall:
        """Call a function on every replica once the next program has been sent. The function is distnb's own.

        Args:
            ask: Returns the function and its arguments when the call is sent.
            changed: The handles of the objects that the call changes. It is sent before a program that reads them.
        """

        def send() -> Future:
            with self._dispatch.turn, self._dispatch.interrupts:
                return self._pend(self._post(spec, "", ask(), {}, users=False), users=False)

        deferred = DeferredCall(send, {state_of_handle(handle).identity for handle in changed})
        self._deferred.append(deferred)
        return deferred

    def send_deferred(self, *, urgent_only: bool = False) -> None:
        """Send the deferred calls, or only the urgent ones."""
        calls, self._deferred = self._deferred, [each for each in self._deferred if urgent_only and not each.urgent]
        for call in calls:
            if call.urgent or not urgent_only:
                call.send()

    def finish(self) -> None:
        """Wait, at the end of a cell, for every call that was sent with `wait=False`.

        Raises:
            BaseException: The error of the first call that failed, unless its future has raised it already.
        """
        self._pending.finish()

    def _post(
        self, spec: StrategySpec, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, users: bool = True
    ) -> _Call:
        """Send a call, by plan or packed. The caller holds the turn, and is within `interrupts`."""
        namespace, self.latest_strategy = self._namespace, spec.kind
        changed = [each.changes for each in self._deferred] if users and self._deferred else ()
        planned = self._plans.next_call(spec, method, args, kwargs, changed)
        if planned is not None:
            team, snapshot = planned.plan.team, planned.snapshot
        else:
            team = self._engines.team(spec)
            self._engines.teams.used.add(spec)
            snapshot = self._packed(team, args, kwargs, users)
        namespace.operations.changes += users
        program = self._dispatch.number()
        self._runs.failure = None
        if planned is not None:
            message: Any = planned.message(program)
        else:
            is_plan = self._plans.make(program, spec, team, method, args, kwargs, snapshot)
            message = CallFunction(
                program=program, team=team, strategy=spec, method=method, snapshot=snapshot, is_plan=is_plan
            )
        try:
            outcome = self._dispatch.post(program, team.engines, message)
        except BaseException:
            namespace.failed(snapshot)
            raise
        return _Call(outcome, team, snapshot, namespace.operations.changes, planned)

    def _packed(self, team: Team, args: Sequence[Any], kwargs: Mapping[str, Any], users: bool) -> Snapshot:
        namespace = self._namespace
        with self._dispatch.interrupts.brief():
            if self._pending and namespace.may_be_changed(team):
                self._pending.wait()  # a call under way may change values that this one sends
            snapshot = namespace.outgoing_call(args, kwargs, team)
            if users and any(namespace.reads(team, each.changes) for each in self._deferred):
                namespace.failed(snapshot)
                self.send_deferred()
                snapshot = namespace.outgoing_call(args, kwargs, team)
        return snapshot

    def _pend(self, call: _Call, *, users: bool = True) -> Future:
        """Return the future of a call; `users` is True for a call of the user's."""
        program = call.outcome.program

        def finish(keep: Callable[[Any], object]) -> Any:
            result = self._finish_call(call, call.outcome.interrupted, keep)
            self._pending.discard(program)
            return result

        pending = Future(finish)
        self._pending.add(program, pending, users=users)
        return pending

    def _finish_call(
        self,
        call: _Call,
        known: bool = False,
        keep: Callable[[Any], object] = lambda result: None,
    ) -> Any:
        """Wait for a call and merge its effects.

        Args:
            known: Whether the interrupt of the call has been raised already.
            keep: Called with the result before SIGINT can raise again.
        """
        outcome, team, snapshot = call.outcome, call.team, call.snapshot
        with self._dispatch.turn, self._dispatch.interrupts as interrupts:
            self._runs.wait(outcome, team)
            result, well = None, outcome.ok and (known or not outcome.stopped)
            if well and call.planned is not None:
                tracked = call.planned.plan.tracked
                result = quick_result(outcome.replies, team, tracked, self._namespace.operations, call.changes)
                if result is not MISSING:
                    tracked.outstanding.pop(snapshot.serial, None)
                    step_count.stepped(outcome.replies[team.engines[0]].steps)
                    keep(result)
                    return result
            with interrupts.brief():
                if outcome.ok:  # an interrupt may have arrived too late
                    values = {team.rank_of(engine): reply.value for engine, reply in outcome.replies.items()}
                    step_count.stepped(outcome.replies[team.engines[0]].steps)
                    result = self._namespace.result(team, values, call.changes)
                else:
                    self._namespace.failed(snapshot, outcome.results(team))
                if outcome.stuck:
                    self._namespace.failed(snapshot)
                if well:
                    keep(result)
        if not well:
            self._runs.raise_failure(outcome, team, called=True)
        return result
