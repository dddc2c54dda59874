"""What closures know of objects of torchmetrics, and of libraries that are loaded later, such as Keras."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from distnb.compat.torchmetrics_internals import forget_result, set_updates, updates

__all__ = ["Described", "Library", "libraries", "library_of", "parts_of"]


class Described(NamedTuple):
    """A resource.

    Attributes:
        describe: Gives what a worker makes its own of.
        settings: What may change later, and goes with each closure.
    """

    describe: Callable[[], Any]
    settings: Any


class Library(ABC):
    """Another library's objects in closures: how they are pickled, what is a resource, and what is a metric.

    A metric counts on workers, from a closure's beginning; what it has counted is added up on the coordinator once the
    closure has ended.
    """

    def parts(self, root: Any) -> Iterable[Any]:
        """The modules in a model that belong to its description, and may be none of its own to torch."""
        return ()

    def reduced(self, obj: Any) -> Any:
        """How an object is pickled, as `__reduce__` gives it; None: as ever."""
        return None

    def described(self, obj: Any) -> Described | None:
        """What an object is that is a resource, and no module."""
        return None

    def set(self, resource: Any, settings: Any) -> bool:
        """Give a worker's own what goes with a closure. False: it is not of this library."""
        return False

    @abstractmethod
    def is_metric(self, obj: Any) -> bool:
        """Whether workers count something by it that is added up on the coordinator."""

    @abstractmethod
    def reset(self, metric: Any) -> None:
        """A closure begins, on a worker."""

    @abstractmethod
    def contribution(self, metric: Any) -> Any:
        """What the closure has counted; None: nothing."""

    @abstractmethod
    def merge(self, metric: Any, contribution: Any) -> None:
        """Add it, on the coordinator."""


class _Torchmetrics(Library):
    def is_metric(self, obj: Any) -> bool:
        return isinstance(obj, torch.nn.Module) and hasattr(obj, "merge_state") and hasattr(obj, "metric_state")

    def reset(self, metric: Any) -> None:
        metric.reset()

    def contribution(self, metric: Any) -> Any:
        count = updates(metric)
        return (count, metric.metric_state) if count else None

    def merge(self, metric: Any, contribution: tuple[int, dict[str, Any]]) -> None:
        count, state = contribution
        before = updates(metric)
        set_updates(metric, before + count)
        forget_result(metric)
        if not before:  # nothing was in it: what came is all
            for name, value in state.items():
                setattr(metric, name, value)
        else:
            metric.merge_state(state)


libraries: list[Library] = [_Torchmetrics()]
"""Those that are known; one that is loaded later adds its own."""


def library_of(metric: Any) -> Library | None:
    """The library of a metric; None: it is no metric."""
    return next((each for each in libraries if each.is_metric(metric)), None)


def parts_of(root: Any) -> Iterator[Any]:
    """An object, and, of a model, all modules in it, in one order in every process."""
    yield from root.modules() if isinstance(root, torch.nn.Module) else (root,)
    for library in libraries:
        yield from library.parts(root)
