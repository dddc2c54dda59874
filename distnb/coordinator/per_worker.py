"""Values of which each worker has its own: it makes them when a closure that it runs first uses them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from distnb.coordinator import references
from distnb.errors import OptionError, ProgramError
from distnb.options import InputContext

__all__ = ["PerWorkerDataset", "PerWorkerIterator", "PerWorkerValues", "Share"]

Share = Callable[[Any], int]
"""Gives the number of what each worker is to be sent once."""


class PerWorkerValues:
    """Stands for one value on each worker: among the arguments of a scheduled function it is the worker's own.

    A worker that has taken a lost one's place makes it anew.
    """

    def __init__(self, number: int, name: str) -> None:
        self._number = number
        self._name = name

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        references.found(f"A {type(self).__name__}").needs[self._number] = None
        return references.open_resource, (self._number,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name}>"


class PerWorkerDataset(PerWorkerValues):
    """Stands for one dataset on each worker. `iter` gives an iterator of each, to be passed to scheduled functions."""

    def __init__(self, number: int, name: str, share: Share) -> None:
        super().__init__(number, name)
        self._share = share
        self._iterators = 0

    def __iter__(self) -> PerWorkerIterator:
        self._iterators += 1
        return PerWorkerIterator(self._share(_MakeIterator(self, self._iterators)), self._name)


class PerWorkerIterator(PerWorkerValues, Iterator[Any]):
    """Stands for one iterator on each worker: in a scheduled function `next(iterator)` gives its next element."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise ProgramError(
            "next() was called on a per-worker iterator on the coordinator, and the elements are on the workers. Pass "
            "the iterator to a scheduled function, which calls next(): coordinator.schedule(step, args=(iterator,))."
        )


class MakeValue:
    """Makes a worker's own value.

    Args:
        function: Called without arguments.
    """

    def __init__(self, function: Callable[[], Any], number: int) -> None:
        self._function = function
        self._number = number  # two values of one function are two

    def make_for_worker(self, worker: int) -> Any:
        """The value."""
        return self._function()


class MakeDataset:
    """Makes a worker's own dataset.

    Args:
        dataset: It, or the function that makes it, of no argument or of an InputContext.
    """

    def __init__(self, dataset: Any, workers: int, replicas: int, number: int) -> None:
        self._dataset = dataset
        self._workers = workers
        self._replicas = replicas
        self._number = number

    def make_for_worker(self, worker: int) -> Any:
        """The dataset."""
        if not is_function(self._dataset):
            return self._dataset
        if not takes_context(self._dataset):
            return self._dataset()
        return self._dataset(InputContext(self._workers, worker, self._replicas))


class _MakeIterator:
    def __init__(self, dataset: PerWorkerDataset, number: int) -> None:
        self._dataset = dataset
        self._number = number

    def make_for_worker(self, worker: int) -> Any:
        return iter(self._dataset)


def is_function(dataset: Any) -> bool:
    """Whether it is a function that makes a dataset."""
    return callable(dataset) and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def takes_context(function: Callable[..., Any]) -> bool:
    """Whether a dataset function takes an InputContext. OptionError: it takes more."""
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
