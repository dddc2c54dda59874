"""Treatment in closures of objects of torchmetrics, and of libraries that are loaded later, such as Keras."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from distnb.runtime.scopes import counted_metrics, metric_binding

__all__ = ["Library", "ResourceDescription", "libraries", "library_of", "parts_of"]


class ResourceDescription(NamedTuple):
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
        """Return the modules in a model that belong to its description, and may be none of its own to torch."""
        return ()

    def reduced(self, obj: Any) -> Any:
        """Return the pickled form of an object, as `__reduce__` does; None for the usual one."""
        return None

    def described(self, obj: Any) -> ResourceDescription | None:
        """Return the type of an object that is a resource, and no module."""
        return None

    def set(self, resource: Any, settings: Any) -> bool:
        """Give a worker's own what goes with a closure. False: it is not of this library."""
        return False

    def load(self) -> None:
        """Prepare the library as the coordinator's is: a function that may use it is about to run."""
        return

    def check(self, metric: Any) -> None:
        """Raise CannotTravelError if workers cannot count by a metric."""
        return

    def opened(self, metric: Any) -> None:
        """Prepare a metric that a worker has made its own of."""
        return

    @abstractmethod
    def is_metric(self, obj: Any) -> bool:
        """Return whether workers count something by it that is added up on the coordinator."""

    @abstractmethod
    def reset(self, metric: Any) -> None:
        """Reset the metric on a worker: a closure begins."""

    @abstractmethod
    def contribution(self, metric: Any) -> Any:
        """Return the closure's contribution; None if there is none."""

    @abstractmethod
    def merge(self, metric: Any, contribution: Any) -> None:
        """Add it, on the coordinator."""


class _Torchmetrics(Library):
    """Metrics, collections of metrics, and wrappers."""

    def is_metric(self, obj: Any) -> bool:
        torchmetrics: Any = sys.modules.get("torchmetrics")
        return torchmetrics is not None and isinstance(obj, (torchmetrics.Metric, torchmetrics.MetricCollection))

    def check(self, metric: Any) -> None:
        counted_metrics.check(metric)
        metric_binding.install()

    def load(self) -> None:
        if "torchmetrics" in sys.modules:
            metric_binding.install()

    def opened(self, metric: Any) -> None:
        counted_metrics.note_attributes(metric)

    def reset(self, metric: Any) -> None:
        counted_metrics.reset(metric)

    def contribution(self, metric: Any) -> Any:
        return counted_metrics.contribution(metric)

    def merge(self, metric: Any, contribution: Any) -> None:
        counted_metrics.add(metric, contribution)


libraries: list[Library] = [_Torchmetrics()]
"""Those that are known; one that is loaded later adds its own."""


def library_of(metric: Any) -> Library | None:
    """Return the library of a metric; None of other objects."""
    return next((each for each in libraries if each.is_metric(metric)), None)


def parts_of(root: Any) -> Iterator[Any]:
    """Yield an object and, of a model, all modules in it, in the same order in every process."""
    yield from root.modules() if isinstance(root, torch.nn.Module) else (root,)
    for library in libraries:
        yield from library.parts(root)
