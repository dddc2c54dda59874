"""Calls that repeat an earlier one, whose plan this engine has kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from distnb import strategies
from distnb.engine.namespace.descriptions import Describer
from distnb.engine.namespace.engine_namespace import EngineNamespace, Mark
from distnb.engine.namespace.engine_objects import EngineObjects
from distnb.engine.programs.started_threads import threads_awaited
from distnb.engine.programs.team_programs import TeamPrograms
from distnb.objects.code.function_parts import FunctionParts, has_constant_parts
from distnb.objects.memory.blocks import dense_tensor, is_stored
from distnb.objects.placeholder import Placeholder
from distnb.runtime.randomness import streams
from distnb.values import PerReplica
from distnb.values.structure import flatten, select, unflatten
from distnb.wire.exchange import NamedArgument, Snapshot, Upkeep
from distnb.wire.messages import CallFunction, ObjectId, Reply
from distnb.wire.planned import BARE, SECTION, SHORT, OwnTensor, OwnTensors, PlannedCall, PlannedReply, opened

__all__ = ["PlannedCalls"]

_MOST = 128  # twice as many as the notebook's plans
_QUICK = frozenset({PerReplica, tuple, list, dict})


class _Returned(NamedTuple):
    """The result of a call that had no other effect."""

    value: Any


class _Plan:
    """A plan: the message of the call that made it, and the functions and data that this call read."""

    def __init__(self, message: CallFunction) -> None:
        self.message = message
        snapshot = message.snapshot
        self.key, self.inquiry = snapshot.team, snapshot.inquiry
        self.strategy = strategies.resolve(message.strategy)
        self.functions: list[tuple[Any, FunctionParts]] | None = None
        self.fn: Any = None
        self.data: tuple[str, ...] = ()

    def look_up(self, tracker: Any) -> None:
        """Find the functions, before the first call by plan."""
        (fn, *_), _ = self.message.snapshot.arguments
        self.fn = tracker.root(fn.name) if type(fn) is NamedArgument else fn
        sections = {name: tracker.root(name) for name in self.inquiry.sections if name in tracker}
        functions = {name: value for name, value in sections.items() if has_constant_parts(value)}
        self.functions = [(each, FunctionParts(each)) for each in functions.values()]
        self.data = tuple(name for name in sections if name not in functions)


class PlannedCalls:
    """The plans of this engine, by the programs that made them, and the calls by plan.

    Args:
        programs: Runs programs of teams.
        namespace: The engine's namespace.
    """

    def __init__(self, programs: TeamPrograms, namespace: EngineNamespace) -> None:
        self._programs = programs
        self._namespace = namespace
        self._plans: dict[int, _Plan] = {}

    def first(self, message: CallFunction, replica: int) -> Reply:
        """Run an ordinary call, and keep its plan if it makes one.

        The plan is kept before the call, since calls by plan may follow even if this one is ended before it begins.
        """
        if message.is_plan:
            self._plans[message.program] = _Plan(message)
            if len(self._plans) > _MOST:
                del self._plans[next(iter(self._plans))]
        return self._programs.call(message, replica)

    def message(self, call: PlannedCall) -> CallFunction:
        """Return the call that made a plan."""
        return self._plans[call.plan].message

    def repeat(self, call: PlannedCall, replica: int) -> Reply | PlannedReply:
        """Run a call by plan."""
        plan = self._plans[call.plan]
        runs = plan.message.method == "run"

        def body() -> Any:
            mark, args, kwargs = self._open(plan, call, replica)
            streams.keeps_own = runs
            try:
                with threads_awaited():
                    if runs:
                        result = self._programs.run(plan.strategy, plan.fn, args, kwargs)
                    else:
                        result = plan.fn(*select(args, replica))
            except BaseException:
                streams.reset()
                raise
            finally:
                streams.keeps_own = False
            returned = self._returned(plan, mark, result)
            if returned is None:
                streams.reset()
                return self._namespace.close_call(result)
            return returned

        reply = self._programs.run_together(
            call.program, plan.message.team, replica, body, nothing_new=not call.rebound, keeps_stream=runs
        )
        if type(reply.value) is not _Returned:
            return reply
        found = PlannedReply(call.program, call.serial, reply.steps, reply.value.value)
        return found if not reply.caught else reply._replace(value=found.value)

    def _open(self, plan: _Plan, call: PlannedCall, replica: int) -> tuple[Mark, tuple[Any, ...], dict[str, Any]]:
        """Bind names and open the arguments of a call. Return the state of the namespace, and the arguments."""
        namespace = self._namespace
        objects = namespace.teams.of(plan.key)
        if plan.functions is None:
            plan.look_up(objects.tracker)

        def own(identity: ObjectId, kind: str) -> Any:
            return objects.references.resolve(("own", identity, {}, kind))

        def argument(identity: Any, kind: str) -> Any:
            if kind == SECTION:
                return objects.tracker.root(identity)
            return objects.references.resolve(("argument", identity, {}, kind))

        upkeep = Upkeep(release=call.released) if call.released else None
        snapshot = Snapshot(team=plan.key, serial=call.serial, inquiry=plan.inquiry, upkeep=upkeep)
        for name, value in call.rebound.items():
            namespace.user_ns[name] = objects.plain[name] = opened(value, own)
        mark = namespace.open_again(snapshot, replica)
        args, kwargs = opened(call.arguments, argument) if call.arguments else ((), {})
        return mark, args, kwargs

    def _returned(self, plan: _Plan, mark: Mark, result: Any) -> _Returned | None:
        """Return the result of a call as a planned reply has it; None if the call had another effect."""
        if not self._namespace.is_unchanged(mark, random=not streams.is_own):
            return None
        for function, parts in plan.functions or ():
            if not parts.are_of(function):
                return None
        if plan.data and self._namespace.has_changed(mark.snapshot, plan.data):
            return None
        kind = type(result)
        if kind is Placeholder:
            return None
        if kind not in BARE or (kind is str and len(result) > SHORT):
            objects, serial = self._namespace.teams.of(plan.key), mark.snapshot.serial
            own = _own_tensors(objects, serial, result)
            if own is not None:
                result = own
            else:
                describer = Describer(objects, serial, plan.inquiry.most_nbytes)
                result = describer.tree(result)
                if describer.plain:
                    return None
        self._namespace.close_unchanged()
        return _Returned(result)


def _own_tensors(objects: EngineObjects, serial: int, result: Any) -> OwnTensors | None:
    """Keep the tensors of a result, and describe them without a describer. Return None for other results."""
    if type(result) not in _QUICK:
        return None
    try:
        leaves, shape = flatten(result)
    except Exception:  # the container holds itself, or one in it raises any error: a describer keeps the whole  # noqa: BLE001
        return None
    found, tree = [], []
    for leaf in leaves:
        if type(leaf) is PerReplica:
            tensor = _own_tensor(leaf.values[0])
            if tensor is None:
                return None
            found.append(tensor)
            tree.append(...)
        elif type(leaf) in BARE and not (type(leaf) is str and len(leaf) > SHORT):
            tree.append(leaf)
        else:
            return None
    described = OwnTensors(unflatten(shape, tree), tuple(found))
    own = [leaf for leaf in leaves if type(leaf) is PerReplica]
    if any(objects.own(*each) != each[0] for each in zip(described.identities(serial), own, strict=True)):
        return None  # the notebook may have a handle of an object that is returned again
    return described


def _own_tensor(tensor: Any) -> OwnTensor | None:
    """Describe a tensor briefly, as `summarise` does; return None for one of a rare kind."""
    if type(tensor) is not torch.Tensor or not (dense_tensor(tensor) and is_stored(tensor)):
        return None
    graph, shape = tensor.grad_fn is not None, tensor.shape
    at_hand = not shape and tensor.is_cpu and (graph or not tensor.requires_grad)
    number = tensor.item() if at_hand else None
    return str(tuple(shape)), str(tensor.dtype).removeprefix("torch."), str(tensor.device), number, graph
