"""The runtime of default and one-device strategies: this process is the only replica. Loads torch only when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from distnb.accelerators import check_available, placed_on
from distnb.errors import OptionError
from distnb.options import InputContext, InputOptions, ReduceOp, RunOptions, ValueContext
from distnb.runtime import contexts, step_count
from distnb.runtime.base import Owner
from distnb.runtime.call_arguments import BatchNote, check_fits
from distnb.runtime.replica_context import ReplicaContext
from distnb.topology import Device, parse_device
from distnb.values.distributed import DistributedValues
from distnb.values.structure import flatten, map_structure, select

__all__ = ["InProcess", "local_components"]


class InProcess:
    """The runtime whose only replica is this process.

    Args:
        strategy: The strategy.
        device: The device. None: values are not moved. The default strategy has no device, and its own `run`.
    """

    def __init__(self, strategy: Owner, device: str | None = None) -> None:
        self._strategy = strategy
        self._device: Device | None = None if device is None else parse_device(device)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def num_replicas(self) -> int:
        return 1

    def worker_devices(self) -> tuple[str, ...]:
        return (str(self._device or Device("cpu")),)

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context that places new tensors and modules on the device."""
        return nullcontext(self._strategy) if self._device is None else self._scope(self._device)

    @contextmanager
    def _scope(self, device: Device) -> Iterator[Owner]:
        from distnb.runtime.scopes import foreign_libraries

        check_available(device)
        foreign_libraries.prepare()
        with contexts.enter_cross_replica(self._strategy), placed_on(device):
            yield self._strategy

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: RunOptions | None,
    ) -> Any:
        __tracebackhide__ = True  # see Strategy.run
        device, note = self._device, BatchNote()
        assert device is not None
        args = [select(arg, 0, 1, note) for arg in args]
        kwargs = {name: select(arg, 0, 1, note) for name, arg in kwargs.items()} if kwargs else {}
        replica = ReplicaContext(self._strategy, 0, 1, None, note.batch_size, note.slice_size)
        stack = contexts.entries()
        depth = len(stack)
        try:
            stack.append((self._strategy, replica))
            with step_count.calling:
                check_available(device)
                with placed_on(device):
                    result = fn(*args, **kwargs)
        except TypeError as error:
            check_fits(error, fn, args, kwargs)
            raise
        finally:
            del stack[depth:]
        step_count.examples += note.slice_size or 0
        return result

    def reduce(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        """Reduce along the axes, or return the value itself if there are none."""
        from distnb.runtime.reduction.reducing import reduce_alone

        return map_structure(lambda leaf: reduce_alone(op, leaf, axis), select(value, 0, 1))

    def gather(self, value: Any, axis: int) -> Any:
        """Check the value's rank and the axis, and return the value itself."""
        from distnb.runtime.reduction.reducing import checked_axis, tensor_of

        value = select(value, 0, 1)
        for leaf in flatten(value)[0]:
            checked_axis(axis, tensor_of(leaf, "gather"), "gather")
        return value

    def broadcast(self, value: Any, source: int) -> Any:
        if source != 0:
            raise OptionError(f"broadcast from replica {source}: there is one replica, replica 0.")
        return select(value, 0, 1)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return local_components(value)

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        return fn(ValueContext(0, 1))

    def distribute_dataset(self, dataset: Any, batch_size: int | None, options: InputOptions | None) -> Any:
        """Return the dataset itself without a device, or else a dataset of its whole batches on the device."""
        if self._device is None and batch_size is None:
            return dataset
        from distnb.input.distribute import distribute

        return distribute(
            dataset,
            num_replicas=1,
            replica_id=0,
            device=self._device or Device("cpu"),
            batch_size=batch_size,
            options=options,
            shared_randomness=nullcontext,
        )

    def distribute_datasets_from_function(self, fn: Callable[[InputContext], Any], options: InputOptions | None) -> Any:
        """Return the function's dataset without a device, or else a dataset of its batches on the device."""
        if self._device is None:
            return fn(InputContext())
        from distnb.input.distribute import distribute_from_function

        return distribute_from_function(
            fn, num_replicas=1, replica_id=0, device=self._device, options=options, shared_randomness=nullcontext
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because there is one replica."""
        return nullcontext()

    def assert_in_sync(self, value: Any) -> None:
        """Do nothing, because one replica is always in sync."""


def local_components(value: Any) -> tuple[Any, ...]:
    """Return a structure's components in this process: one structure for each replica whose components are here."""
    distributed = [leaf for leaf in flatten(value)[0] if isinstance(leaf, DistributedValues)]
    if not distributed:
        return (value,)
    here = [
        replica for replica in distributed[0].replica_ids if all(replica in other.replica_ids for other in distributed)
    ]
    return tuple(select(value, replica) for replica in here)
