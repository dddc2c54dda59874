"""The notebook's side of the one namespace: what programs need goes out, what they did comes in."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distnb.errors import NamespaceError
from distnb.session.agreeing import agreed_scalar
from distnb.session.arrivals import Arrival
from distnb.session.collecting import Collector
from distnb.session.handles import HANDLES
from distnb.session.local_copies import LocalCopies
from distnb.session.luggage import Luggage, made_for_call, objects_in
from distnb.session.modules import ModuleWatch
from distnb.session.operations import Operations, Perform
from distnb.session.plans import Plan, Plans
from distnb.session.reads import names_read
from distnb.session.spaces import MISSING, Argument, NotebookSpace
from distnb.session.spaces_of_engines import Spaces
from distnb.session.travel import Packer
from distnb.session.user_names import user_names
from distnb.topology import Team
from distnb.values import DistributedValues, structure
from distnb.wire.bindings import Delivery, Effects, Repeat, Returned, SpaceKey
from distnb.wire.environment import capture_environment
from distnb.wire.graph import Side

__all__ = ["NotebookNamespace"]


class NotebookNamespace:
    """Keeps the notebook's namespace and the engines' one and the same, as far as programs can tell.

    Args:
        user_ns: The notebook's variables.
        perform: Applies an operation to an engine object, on several engines: the session's.
        announce: Where notices go; they are printed unless told otherwise.
    """

    def __init__(self, user_ns: dict[str, Any], perform: Perform, announce: Callable[[str], None] = print) -> None:
        self.user_ns = user_ns
        self.side = Side(user_ns)
        self.operations = Operations(self, perform)
        self._announce = announce
        self._spaces = Spaces(self.operations)
        self._serials = itertools.count(1)
        self._modules = ModuleWatch()
        self._plans: dict[SpaceKey, Plans] = {}
        # Grows whenever something is bound on engines: what a plan knows of the bindings there is then out of date.
        self._version = 0

    # -- cells -----------------------------------------------------------------------------------------------------

    def outgoing(self, source: str, team: Team, *, extra_names: Iterable[str] = ()) -> Delivery:
        """What a cell needs. Call it right before the cell is sent, and send what it gives.

        Args:
            source: The cell's text.
            team: Who runs it.
            extra_names: Names to send though the cell does not read them.

        Raises:
            CannotTravelError: A name that it reads cannot be sent: its value, and the cure, are named.
            StaleHandleError: It reads an object that is gone.
        """
        space = self._spaces.of(team.engines)
        space.give_up_cell()
        reads = names_read(source)
        collector = self._collector(space)
        collector.luggage.attributes |= reads.attributes
        optional = sorted(user_names(self.user_ns)) if reads.dynamic else ()
        collector.collect([*sorted(reads.names), *extra_names], optional=optional, remade=reads.assigned)
        return self._send(self._packer(space, collector.luggage), space, cell=True)

    def incoming(self, source: str, team: Team, replies: Mapping[int, Effects]) -> None:
        """Take in what a cell did, whether it failed or not.

        Args:
            source: The cell's text.
            team: Who ran it.
            replies: What `EngineNamespace.finish` gave, by replica; none for those that gave nothing.
        """
        space = self._spaces.of(team.engines)
        if not replies:
            space.give_up_cell()
            return
        self.take_in_call(space, replies, with_result=False)

    # -- calls -----------------------------------------------------------------------------------------------------

    def outgoing_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], team: Team) -> Delivery | Repeat:
        """What a call of a strategy's method needs.

        Args:
            args, kwargs: The method's arguments, functions among them.
            team: Who runs it.

        Raises:
            CannotTravelError, StaleHandleError: An argument, or a name that a function reads, cannot be sent.
        """
        space = self._spaces.of(team.engines)
        space.give_up_cell()
        arguments: tuple[Any, Any] = (tuple(args), dict(kwargs))
        plans = self._usable_plans(space)
        repeated = plans.repeated(arguments, self._version, space, self.side) if plans is not None else None
        if repeated is not None and repeated.place is not None and self._has_nothing_to_tell(space):
            return Repeat(space.key, next(self._serials), repeated.place, repeated.kept)
        objects = list(objects_in(arguments))
        functions = [value for value in objects if isinstance(value, types.FunctionType)]
        plan = plans.find(functions, self._version, space, self.side) if plans is not None else None
        if len(objects) > len(functions) and structure.has_distributed(arguments):
            arguments = structure.replace_distributed(arguments, _as_argument)
            objects = list(objects_in(arguments))
        return self._deliver_call(space, arguments, objects, functions, plan)

    def _plans_of(self, space: NotebookSpace) -> Plans:
        plans = self._plans.get(space.key)
        if plans is None:
            plans = self._plans[space.key] = Plans()
        return plans

    def _usable_plans(self, space: NotebookSpace) -> Plans | None:
        self._spaces.leave_the_dead(space)
        # A name whose object is gone here is to be unbound there, too: that is more than a plan looks at.
        if space.bound_is_released():
            return None
        return self._plans_of(space)

    def _has_nothing_to_tell(self, space: NotebookSpace) -> bool:
        """Whether the engines have nothing to hear of besides a call."""
        if space.ended or space.has_news:
            return False
        now = capture_environment(space.environment)
        if now is not space.environment:
            if not now.since(space.environment).empty:
                return False
            space.environment = now  # the next time it is seen at once
        return True

    def doubt(self, delivery: Delivery | Repeat) -> None:
        """Engines that were given up on may have been ended before they opened a delivery, whatever the others did."""
        for space in self._spaces:
            if space.key == delivery.space and not isinstance(delivery, Repeat):
                space.tell_again(delivery)

    def result(self, team: Team, replies: Mapping[int, Effects | Returned]) -> Any:
        """The result of a call, from what `EngineNamespace.close_call` gave on each replica."""
        return self.take_in_call(self._spaces.of(team.engines), replies)

    def failed(self, delivery: Delivery | Repeat, replies: Mapping[int, Effects | Returned] | None = None) -> None:
        """A call failed, or could not be sent. What it did until then is taken in, as that of a cell is.

        Args:
            delivery: What `outgoing_call` gave for it.
            replies: What `EngineNamespace.give_up_call` gave, by replica. Without any, what the call may have changed
                is sent again.
        """
        for space in self._spaces:
            if space.key != delivery.space:
                continue
            self._plans.pop(space.key, None)  # not even what the engines were asked to keep is sure to have reached all
            if isinstance(delivery, Repeat):
                space.environment = None
            if replies:
                self.take_in_call(space, replies, with_result=False)
            else:
                space.reject(delivery.serial)

    def deliver_call(
        self, space: NotebookSpace, arguments: Any, *, touched: Sequence[DistributedValues] = ()
    ) -> Delivery:
        """The delivery of an operation, on `touched` handles."""
        objects = list(objects_in(arguments, asked=bool(touched)))
        functions = [value for value in objects if isinstance(value, types.FunctionType)]
        plans = self._usable_plans(space)
        plan = plans.find(functions, self._version, space, self.side) if plans is not None else None
        return self._deliver_call(space, arguments, objects, functions, plan, touched)

    def _deliver_call(
        self,
        space: NotebookSpace,
        arguments: Any,
        objects: Sequence[Any],
        functions: Sequence[types.FunctionType],
        plan: Plan | None,
        touched: Sequence[DistributedValues] = (),
    ) -> Delivery:
        collector = self._collector(space)
        luggage = collector.luggage
        packer = self._packer(space, luggage, in_call=True)
        luggage.made = made_for_call(arguments, asked=bool(touched))
        names: set[str] = set()
        if plan is None:
            for function in functions:
                names |= collector.take_value(function, "", function.__name__)
            collector.collect(sorted(names))
        else:
            luggage.watch.update(dict.fromkeys(plan.watch))
            luggage.handles.update(dict.fromkeys(plan.handles))
            blob = plan.packed(arguments) if len(objects) == len(functions) and not touched else None
            if blob is not None:
                return self._sent(packer.deliver(blob), space)
        by_functions = luggage.copy()
        names = set()
        for value in objects:
            names |= (
                collector.take_value(value, "", "an argument of the call")
                if not isinstance(value, types.FunctionType)
                else set()
            )
        for handle in touched:
            names |= collector.take_handle(handle)
        collector.collect(sorted(names))
        delivery = self._send(packer, space, arguments, stale=plan is None or bool(names))
        plans = self._plans_of(space)
        if plan is None and functions and not names:
            plan = plans.make(functions, self._version, space, by_functions, packer)
        if plan is not None and len(objects) == len(functions) and not touched:
            delivery = self._sent(plans.keep(plan, arguments, delivery), space)
        return delivery

    def take_in_call(
        self, space: NotebookSpace, told: Mapping[int, Effects | Returned], *, with_result: bool = True
    ) -> Any:
        """Take in what a program did, and give its result."""
        serial = next(iter(told.values())).serial
        delivery = space.outstanding.get(serial)
        if delivery is None and with_result and len(told) == space.size:
            agreed = agreed_scalar(told.values())
            if agreed is not MISSING:
                return agreed
        effects = {replica: one.effects() if isinstance(one, Returned) else one for replica, one in told.items()}
        watch = delivery.watch if delivery is not None else ()
        arrival = Arrival(space, self.user_ns, self.side, self.operations, effects, watch, self._announce)
        result = None
        try:
            arrival.take_in()
            if with_result:
                result = arrival.result()
        except BaseException:
            space.reject(serial)
            if delivery is None:
                space.rejected.append(serial)
            raise
        arrival.confirm()
        if any(one.names or one.deleted for one in effects.values()):
            self._version += 1
        space.outstanding.pop(serial, None)
        if len(effects) < space.size:
            for identity in watch:
                space.forget(identity)
        return result

    # -- engines that come and go ------------------------------------------------------------------------------------

    def engine_died(self, engine: int) -> None:
        """An engine's process has ended; from any thread. Programs on those that are left use what lives there."""
        self._spaces.engine_died(engine)

    def engines_replaced(self, engines: Iterable[int], survivors: Iterable[int]) -> None:
        """New processes have taken the place of some engines. Mirrored objects are restored to them from a survivor.

        Args:
            engines: The replaced ones, up and ready.
            survivors: Engines of the cluster that kept their process.
        """
        self._spaces.engines_replaced(engines, survivors)

    def close(self) -> None:
        """The cluster is gone: every handle is stale."""
        self._spaces.close()

    # -- the default strategy ----------------------------------------------------------------------------------------

    @contextmanager
    def localise(self, source: str) -> Iterator[tuple[str, ...]]:
        """Let a cell that runs in the notebook work on copies of the mirrored objects that it reads.

        Within the context, names bound to handles (also in the notebook's containers and functions that the cell
        reads) hold copies of replica 0's objects, made together; afterwards the names are the handles again, unless
        the cell assigned them.

        Args:
            source: The cell's text.

        Returns:
            The names that hold copies.

        Raises:
            StaleHandleError, NamespaceError: An object is gone, or cannot be copied.
        """
        copies = LocalCopies(self.user_ns, self.side, self.operations, self._announce)
        names = copies.bind(names_read(source))
        try:
            yield names
        finally:
            copies.unbind()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _collector(self, space: NotebookSpace) -> Collector:
        if space.ended:
            raise NamespaceError(
                "The engines of this strategy were restarted or stopped while it was in use. Run the cell again."
            )
        space.twins.sweep()
        return Collector(space, self.user_ns, self.side)

    def _packer(self, space: NotebookSpace, luggage: Luggage, *, in_call: bool = False) -> Packer:
        serial = next(self._serials)
        return Packer(space, self.side, serial, self._modules, self._announce, luggage, in_call=in_call)

    def _send(
        self, packer: Packer, space: NotebookSpace, arguments: Any = None, *, cell: bool = False, stale: bool = True
    ) -> Delivery:
        delete = self._stale_names(space, packer.luggage.bindings) if stale else ()
        delivery = packer.pack(arguments, delete=delete)
        if packer.luggage.bindings or delete:
            self._version += 1
        if cell:
            space.cell = delivery.serial
        return self._sent(delivery, space)

    def _sent(self, delivery: Delivery, space: NotebookSpace) -> Delivery:
        space.outstanding[delivery.serial] = delivery
        return delivery

    def _stale_names(self, space: NotebookSpace, bindings: Mapping[str, Any]) -> list[str]:
        """Names on these engines that are gone from the notebook, or mean something else by now."""
        stale: list[str] = []
        engines = set(space.key[0])
        for other in self._spaces:
            if engines.isdisjoint(other.key[0]):
                continue
            old = [name for name in other.bound if name not in bindings and not other.is_current(name, self.user_ns)]
            for name in old:
                del other.bound[name]
            stale += old
        return stale


def _as_argument(value: DistributedValues) -> Any:
    return Argument(value) if isinstance(value, HANDLES) else value
