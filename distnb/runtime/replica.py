"""The runtime of a strategy on one replica of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import placed_on, torch_device
from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.flat_packs import Packs
from distnb.collectives.gradients.gradient_sync import GradientSync
from distnb.collectives.gradients.optimizer_steps import note_versions, writes
from distnb.collectives.gradients.parameter_groups import Identity
from distnb.errors import DistributedValueError, OptionError
from distnb.input.distribute import distribute, distribute_from_function
from distnb.options import (
    CommunicationImplementation,
    CommunicationOptions,
    InputContext,
    InputOptions,
    ReduceOp,
    RunOptions,
    ValueContext,
)
from distnb.runtime import contexts, shared_files, step_count
from distnb.runtime.base import Owner
from distnb.runtime.call_arguments import BatchNote, check_fits
from distnb.runtime.central.shared_optimizers import SharedOptimizers
from distnb.runtime.central.shared_variables import SharedVariables
from distnb.runtime.consistency import drift
from distnb.runtime.consistency.agreement import distributed
from distnb.runtime.consistency.resynchronisation import resynchronise
from distnb.runtime.consistency.sync_check import assert_in_sync
from distnb.runtime.in_process import local_components
from distnb.runtime.randomness import streams
from distnb.runtime.reduction.gathering import broadcast_tree, gather_tensor
from distnb.runtime.reduction.reducing import checked_axis, plain_value_error, reduce_alone, reduce_leaves, tensor_of
from distnb.runtime.replica_context import ReplicaContext
from distnb.runtime.scopes import foreign_libraries
from distnb.runtime.scopes.divided_objects import is_divided
from distnb.runtime.scopes.made_objects import CHANGES
from distnb.runtime.scopes.registration import Registration, is_scope_buffer
from distnb.runtime.scopes.unmanaged import UnmanagedCheck
from distnb.runtime.this_process import this_process
from distnb.runtime.variable_homes import ReplicaHome
from distnb.values.distributed import DistributedValues
from distnb.values.structure import flatten, map_structure, select, unflatten
from distnb.variables.variable import SyncOnReadVariable, Variable, component_of

if TYPE_CHECKING:
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["Spmd"]


class Spmd:
    """The runtime of a strategy on this replica. All replicas make the same calls in the same order.

    Args:
        process: This process as a replica.
        strategy: The strategy.
        single_copy: Whether to keep a single copy of each variable, in memory that all replicas share.

    Attributes:
        preferences: The arguments for `GroupCore.prefer`.
        registration: The registration of the strategy's variables on this replica.
        home: The home of these variables.
    """

    def __init__(self, process: SpmdProcess, strategy: Owner, *, single_copy: bool = False) -> None:
        self._process = process
        self._strategy = strategy
        options = strategy.spec.option("communication_options", CommunicationOptions())
        self._ops = strategy.spec.option("cross_device_ops")
        self._packs = Packs.larger_than(options.bytes_per_pack)
        if self._ops is not None:
            self._packs = Packs(count=self._ops.num_packs)
        self._of_group: Aggregation | None = None
        self.preferences = (options.timeout_seconds, options.implementation is not CommunicationImplementation.RING)
        self._sync = GradientSync(
            self._aggregation,
            strategy.spec.option("gradient_reduction", "sum"),
            check_mean_loss=strategy.spec.option("check_mean_loss", True),
            in_replica=contexts.in_replica,
            is_current=self._is_current,
            before_common_pass=self._before_common_pass,
        )
        self._shared: SharedVariables | None = None
        self._optimizers: SharedOptimizers | None = None
        if single_copy:
            self._shared = SharedVariables(lambda: process.group)
            self._optimizers = SharedOptimizers(lambda: process.group, self._shared, self._sync)
        self.registration = self._make_registration()
        self.home = ReplicaHome(self.registration, self._aggregation)
        self._unmanaged = UnmanagedCheck(strategy, self.owns)
        self._in_scope = False
        self._unbind_names: Callable[[], None] = lambda: None
        self._generation: int | None = None
        self._steps_reported = False
        self._runs = 0

    def begin_program(self) -> None:
        """Close what an earlier program left open: an interrupt can arrive as a context begins to exit."""
        self._in_scope = False
        self._runs = 0
        self._sync.begin_program()

    def _make_registration(self) -> Registration:
        return Registration(self._strategy, self._sync, lambda: self._process.group, self._shared)

    def _aggregation(self) -> Aggregation:
        """Return the strategy's aggregation on the current process group."""
        group, found = self._process.group, self._of_group
        if found is None or found.group is not group:
            found = self._of_group = Aggregation(group, self._ops, self._packs)
        return found

    def owns(self, made: Any) -> bool:
        """Return whether this strategy keeps a parameter or a model's parameters in sync."""
        return self.registration.owns(made)

    def changed_by_hand(self) -> dict[str, int]:
        """Return digests of the mirrored parameters that may differ between replicas, by name.

        The first use of the strategy in a new generation compares all parameters, so the result is empty until then.
        """
        if self._shared is not None or self._generation != self._process.group.generation:
            return {}
        return self._sync.changed_by_hand()

    def writes(self) -> dict[tuple[str, Identity | None], int]:
        """Return the number of writes to each model's parameters in this generation, after a program has failed.

        The keys are the models' descriptions, which several models may share, and identities.

        The notebook compares the numbers and reports replicas that ended at different steps. The resynchronisation need
        not warn again (`steps_reported`).
        """
        if self._shared is not None or self._generation != self._process.group.generation:
            return {}
        self._steps_reported = True
        return {(group.description, group.identity): writes(group) for group in self._sync.groups}

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def num_replicas(self) -> int:
        return self._process.team.size

    def worker_devices(self) -> tuple[str, ...]:
        return tuple(map(str, self._process.team.devices))

    # Making variables -------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """Return a context in which parameters are made equal and kept in sync.

        New tensors in it are on the replica's device.
        """
        with contexts.enter_cross_replica(self._strategy), placed_on(self._process.device):
            if self._in_scope:
                yield self._strategy
                return
            foreign_libraries.prepare()
            calls = self._process.group.begin_call()
            try:
                self._in_scope = True
                self._unbind_names = this_process.note_names()
                self._resynchronise("strategy.scope")
                self.register_made()
                self._sync.listen()
                with self.registration.noting():
                    yield self._strategy
                self.register_made()
                if self._shared is not None:
                    self._shared.synchronise()
            except BaseException as error:
                shared_files.explain(error)
                if self.registration.discard_made():
                    self._unbind_names()  # unbinds the names of variables that were never made equal
                calls.fail("strategy.scope", error)
                raise
            finally:
                self._in_scope = False
                calls.cross()

    def register_made(self) -> None:
        """Register the objects that scopes have made so far, on all replicas, before a call that may use them."""
        if not self.registration.pending:
            return
        if self.registration.register_made() and self._shared is not None:
            self._shared.synchronise()
        if self._in_scope:
            self._unbind_names = this_process.note_names()

    def settle(self) -> None:
        """Prepare for other replicas. All current replicas call this."""
        self.register_made()

    def before_optimizer(self) -> None:
        """Prepare for an optimizer of modules that the current scope may have made, on all replicas."""

    def _is_current(self) -> bool:
        innermost = contexts.innermost()
        return innermost is not None and innermost[0] is self._strategy

    def _before_common_pass(self) -> None:
        innermost = contexts.innermost()
        if innermost is None or innermost[0] is self._strategy:
            self.register_made()

    def _resynchronise(self, within: str) -> None:
        # A program that ended in the middle of a step may have left different values on the replicas.
        group = self._process.group
        if self._generation != group.generation:
            if group.size > 1:
                group.note(within, ())
            if self._optimizers is not None:
                self._optimizers.end_half_steps()
            self._generation = group.generation
            if group.size > 1:
                resynchronise(
                    group, self._sync.groups, self.registration.buffers(), steps_reported=self._steps_reported
                )
                note_versions(self._sync.groups, again=True)
                self.registration.statistics.note()
                self._sync.meet()
            self._steps_reported = False

    # Computing on replicas --------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: RunOptions | None,
    ) -> Any:
        """Call the function once, as this replica, with this replica's components of the arguments."""
        __tracebackhide__ = True  # see Strategy.run
        process = self._process
        if process.team.size == 1:
            self.register_made()
            return self._run(fn, args, kwargs)
        foreign_libraries.prepare()
        calls = process.group.begin_call()
        try:
            if self._generation != process.group.generation:
                self._resynchronise("strategy.run")
            self.register_made()
            if process.is_script:
                if drift.is_due(self._runs):
                    drift.compare(process.group, self.changed_by_hand())
                self._runs += 1
            return self._run(fn, args, kwargs)
        except BaseException as error:
            process.group.fail_call(error)
            raise
        finally:
            calls.cross()

    def _run(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        __tracebackhide__ = True  # see Strategy.run
        process, note, stack = self._process, BatchNote(), contexts.entries()
        depth, inside = len(stack), streams.depth
        rank, size = process.rank, process.team.size
        own_args = [select(arg, rank, size, note) for arg in args]
        own_kwargs = {name: select(arg, rank, size, note) for name, arg in kwargs.items()} if kwargs else {}
        aggregation = self._aggregation()
        replica = ReplicaContext(self._strategy, rank, size, aggregation, note.batch_size, note.slice_size)
        if size > 1:
            self._unmanaged.check(fn, own_args, own_kwargs)
            changes = CHANGES.count
            self._sync.weight(note.slice_size, note.batch_size)
        failed = True
        with step_count.calling:
            try:
                stack.append((self._strategy, replica))
                if size > 1:
                    streams.enter(rank)
                with placed_on(process.device):
                    result = fn(*own_args, **own_kwargs)
                if size > 1:
                    self._sync.end_function()
                failed = False
            except Exception as error:
                if isinstance(error, TypeError):
                    check_fits(error, fn, own_args, own_kwargs)
                note.explain(error, rank, size)
                self._explain(error)
                raise
            finally:
                del stack[depth:]
                streams.leave(inside)
                self._function_ended(failed=failed)
        step_count.examples += note.slice_size or 0
        if size > 1 and CHANGES.count != changes:
            self._unmanaged.check(fn, own_args, own_kwargs)  # the call has made or built modules, so check again
        return result if size == 1 else process.agreement.regroup(process.group, fn, result, (args, kwargs))

    def _explain(self, error: Exception) -> None:
        """Raise another error if a function of `run` raised one whose cause is this runtime."""

    def _function_ended(self, *, failed: bool) -> None:
        """Handle the end of a function of `run`; `failed` if it raised."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients on this replica only."""
        return self._sync.no_sync()

    # Combining values -------------------------------------------------------------------------------------------

    def reduce(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        process = self._process
        self.register_made()
        if process.size == 1:
            return map_structure(lambda leaf: reduce_alone(op, leaf, axis), select(value, 0, 1))
        leaves, shape = flatten(value)
        results = list(leaves)
        places = [place for place, leaf in enumerate(leaves) if self._is_distributed(leaf, op)]
        own = [self._own(leaves[place]) for place in places]
        if own:
            reduced = reduce_leaves(self._aggregation(), op, own, axis, torch_device(process.device))
            for place, result in zip(places, reduced, strict=True):
                results[place] = result
        return unflatten(shape, results)

    def _is_distributed(self, leaf: Any, op: ReduceOp) -> bool:
        if self._has_components(leaf):
            if isinstance(leaf, DistributedValues):
                leaf.require_same_kind("reduce")
            return True
        if op is ReduceOp.MEAN and not isinstance(leaf, (bool, str, bytes, type(None))):
            return False  # the mean of equal values is that value
        raise plain_value_error(op, leaf, self._process.size)

    def _has_components(self, leaf: Any) -> bool:
        """Return whether each replica has its own component of a value."""
        if not isinstance(leaf, torch.Tensor):
            return isinstance(leaf, DistributedValues)
        return self.registration.owns(leaf) or is_scope_buffer(leaf) or is_divided(leaf)

    def _own(self, leaf: Any) -> Any:
        leaf = select(leaf, self._process.rank, self._process.size)
        if isinstance(leaf, torch.Tensor) and is_divided(leaf):
            return leaf.full_tensor()  # type: ignore[attr-defined]
        return component_of(leaf) if isinstance(leaf, Variable) else leaf

    def gather(self, value: Any, axis: int) -> Any:
        process = self._process
        self.register_made()

        def one(leaf: Any) -> torch.Tensor:
            if process.size > 1 and not self._has_components(leaf):
                raise DistributedValueError(
                    f"gather got a plain {type(leaf).__name__}. Only a value with a component for each replica can be "
                    "gathered: a PerReplica that strategy.run returned, or a value of "
                    "strategy.distribute_values_from_function. To gather what each replica has computed outside run, "
                    "return it from a function: strategy.gather(strategy.run(lambda: value), axis=0)."
                )
            if isinstance(leaf, DistributedValues):
                leaf.require_same_kind("gather")
            tensor = tensor_of(self._own(leaf), "gather")
            place = checked_axis(axis, tensor, "gather")
            return tensor if process.size == 1 else gather_tensor(process.group, tensor, place, "gather")

        return map_structure(one, value)

    def broadcast(self, value: Any, source: int) -> Any:
        process = self._process
        self.register_made()
        if not 0 <= source < process.size:
            raise OptionError(f"broadcast from replica {source}: the replicas are 0 to {process.size - 1}.")
        own = map_structure(self._own, select(value, process.rank, process.size))
        return own if process.size == 1 else broadcast_tree(process.group, own, source)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return this replica's component, in a tuple."""
        if any(isinstance(leaf, SyncOnReadVariable) for leaf in flatten(value)[0]):
            value = map_structure(self._own, value)  # reading the variable would combine all components
        return local_components(value)

    def assert_in_sync(self, value: Any) -> None:
        self.register_made()
        if self._process.size > 1:
            assert_in_sync(self._process.group, select(value, self._process.rank, self._process.size))

    # Values and data ----------------------------------------------------------------------------------------------

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """Return the function's value for this replica, as a component."""
        rank, size = self._process.rank, self._process.size
        value = fn(ValueContext(rank, size))
        return value if size == 1 else distributed(self._process.group, value)

    def distribute_dataset(self, dataset: Any, batch_size: int | None, options: InputOptions | None) -> Any:
        """Return a dataset of this replica's slices of the global batches."""
        return distribute(dataset, batch_size=batch_size, options=options, current=_reading, **_reading())

    def distribute_datasets_from_function(self, fn: Callable[[InputContext], Any], options: InputOptions | None) -> Any:
        """Return a dataset of this replica's batches from its worker's pipeline."""
        return distribute_from_function(fn, options=options, current=_reading, **_reading())


def _reading() -> dict[str, Any]:
    """Return the arguments of `distribute` for this replica, as they are now."""
    process = this_process.replica
    assert process is not None, "only a replica reads a distributed dataset"
    return {
        "num_replicas": process.size,
        "replica_id": process.rank,
        "device": process.device,
        "workers": process.workers,
        "shared_randomness": streams.shared,
        # A function, because the dataset may outlive the current group.
        "agree": lambda value: process.group.all_gather_object(value),
    }
