"""Values that exist once on each worker. A worker makes its value when a closure first uses it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from distnb.errors import CannotTravelError, OptionError, ProgramError
from distnb.input.batch_placement import placement_for
from distnb.options import InputContext
from distnb.servers.variables.here import servers_here
from distnb.topology import parse_device
from distnb.values.structure import map_structure

__all__ = ["Maker", "PerWorkerDataset", "PerWorkerIterator", "PerWorkerValues"]


class Maker(Protocol):
    """Maker of a worker's own value. It is sent to each worker once."""

    def make_for_worker(self, worker: int) -> Any: ...


class PerWorkerValues:
    """Reference to one value on each worker. As an argument of a scheduled function it becomes the worker's own value.

    A worker that replaces a lost one makes its value again.
    """

    def __init__(self, maker: Maker, name: str) -> None:
        self.maker = maker
        self._name = name

    def __reduce__(self) -> Any:
        raise CannotTravelError(
            f"A {type(self).__name__} can only be sent as an argument of coordinator.schedule, or as a value that "
            "the scheduled function refers to."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name}>"


class PerWorkerDataset(PerWorkerValues):
    """Reference to one dataset on each worker. `iter` returns a reference to an iterator on each, for scheduled
    functions.
    """

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(_IteratorMaker(self), self._name)


class PerWorkerIterator(PerWorkerValues, Iterator[Any]):
    """Reference to one iterator on each worker. In a scheduled function, `next(iterator)` returns its worker's next
    element.
    """

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise ProgramError(
            "next() was called on a per-worker iterator here, on the coordinator; the elements are on the workers. "
            "Pass the iterator to a scheduled function, which calls next(): coordinator.schedule(step, "
            "args=(iterator,))."
        )


class ValueMaker:
    """Maker of a worker's own value.

    Args:
        function: A function without arguments that returns the value.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def make_for_worker(self, worker: int) -> Any:
        """Return the value."""
        return self._function()


class DatasetMaker:
    """Maker of a worker's own dataset.

    Args:
        dataset: The dataset, or the function that makes it, without arguments or with an InputContext.
        workers: The number of workers.
        replicas: The number of replicas in sync.
    """

    def __init__(self, dataset: Any, workers: int, replicas: int) -> None:
        self._dataset = dataset
        self._workers = workers
        self._replicas = replicas

    def make_for_worker(self, worker: int) -> Any:
        """Return the dataset."""
        if not is_function(self._dataset):
            return self._dataset
        if not accepts_context(self._dataset):
            return self._dataset()
        # A worker that the cluster gained later is one more pipeline.
        return self._dataset(InputContext(max(self._workers, worker + 1), worker, self._replicas))


class _IteratorMaker:
    def __init__(self, dataset: PerWorkerDataset) -> None:
        self._dataset = dataset

    def make_for_worker(self, worker: int) -> Any:
        device = servers_here.access.device
        if device.type == "cpu":
            return iter(self._dataset)
        placement = placement_for(parse_device(str(device)))
        carry = functools.partial(placement.carry, borrowed=False)
        return map(functools.partial(map_structure, carry), self._dataset)


def is_function(dataset: Any) -> bool:
    """Return whether the object is a function that makes a dataset."""
    return callable(dataset) and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def accepts_context(function: Callable[..., Any]) -> bool:
    """Return whether a dataset function takes an InputContext. Raise OptionError if it takes more."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in kinds]
    needed = [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if len(needed) > 1 or any(each.kind == each.KEYWORD_ONLY for each in needed):
        raise OptionError(
            f"A dataset function takes no argument, or an InputContext; {getattr(function, '__name__', function)!s}"
            f"{inspect.signature(function)} takes more."
        )
    return bool(needed) or (len(positional) == 1 and "context" in positional[0].name)
