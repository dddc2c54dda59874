"""Support in closures for objects of torchmetrics and Keras."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from distnb.features import names
from distnb.runtime.scopes import foreign_libraries, metric_binding
from distnb.servers.coordinator import counted_metrics

__all__ = ["Library", "ResourceDescription", "libraries", "library_of", "parts_of", "register_library"]

_LATER = {"keras": ("distnb.servers.keras.by_state", "KerasLibrary")}
"""By library: the class that supports it. It is imported when the library is loaded, on the coordinator or a worker."""


class ResourceDescription(NamedTuple):
    """The description of a resource.

    Attributes:
        describe: A function that returns the data from which a worker makes its own object.
        settings: Settings that may change later, and are sent with each closure.
    """

    describe: Callable[[], Any]
    settings: Any


class Library(ABC):
    """Support for another library's objects in closures: pickling, resources, and metrics.

    A metric counts on workers, from a closure's start. When the closure has ended, the coordinator adds the counts.
    """

    def parts(self, root: Any) -> Iterable[Any]:
        """Return the modules that belong to a model's description, including those that torch does not know of."""
        return ()

    def reduced(self, obj: Any) -> Any:
        """Return the reduction of an object, as `__reduce__` does, or None for the default."""
        return None

    def described(self, obj: Any) -> ResourceDescription | None:
        """Return the description of an object that is a resource but not a module, or None."""
        return None

    def set(self, resource: Any, settings: Any) -> bool:
        """Apply the settings of a closure to a worker's object. Return False if it is not of this library."""
        return False

    def check_settings(self, resource: Any, settings: Any) -> None:
        """Raise ProgramError if a function has changed a worker's object so that it no longer has the settings."""
        return

    def load(self) -> None:
        """Prepare the library as on the coordinator, before a function that may use it runs."""
        return

    def check(self, metric: Any) -> None:
        """Raise CannotTravelError if workers cannot use a metric."""
        return

    def opened(self, metric: Any, device: torch.device) -> None:
        """Prepare a worker's own copy of a metric, on the device."""
        return

    @abstractmethod
    def is_metric(self, obj: Any) -> bool:
        """Return whether workers count with the object, and the coordinator adds the counts."""

    @abstractmethod
    def reset(self, metric: Any) -> None:
        """Reset a worker's metric at the start of a closure."""

    @abstractmethod
    def contribution(self, metric: Any) -> Any:
        """Return the counts of the closure that has ended, or None if there are none."""

    @abstractmethod
    def merge(self, metric: Any, contribution: Any) -> None:
        """Add the counts to the coordinator's metric."""


class _Torchmetrics(Library):
    """Metrics, collections of metrics, and wrappers of torchmetrics."""

    def is_metric(self, obj: Any) -> bool:
        torchmetrics: Any = sys.modules.get("torchmetrics")
        return torchmetrics is not None and isinstance(obj, (torchmetrics.Metric, torchmetrics.MetricCollection))

    def check(self, metric: Any) -> None:
        counted_metrics.check(metric)
        metric_binding.install()

    def load(self) -> None:
        if "torchmetrics" in sys.modules:
            metric_binding.install()

    def opened(self, metric: Any, device: torch.device) -> None:
        metric.to(device)
        counted_metrics.note_attributes(metric)

    def reset(self, metric: Any) -> None:
        counted_metrics.reset(metric)

    def contribution(self, metric: Any) -> Any:
        return counted_metrics.contribution(metric)

    def merge(self, metric: Any, contribution: Any) -> None:
        counted_metrics.add(metric, contribution)


_libraries: list[Library] = [_Torchmetrics()]


def libraries() -> list[Library]:
    """Return the support of all libraries that this process has loaded by now."""
    for name in tuple(_LATER):
        if name not in sys.modules or name not in names("libraries on replicas"):  # its feature is missing
            continue
        if foreign_libraries.computes_with_torch(sys.modules[name]):
            module, cls = _LATER.pop(name)
            register_library(getattr(importlib.import_module(module), cls)())
    return _libraries


def register_library(library: Library) -> None:
    """Add the support of a library."""
    _libraries.append(library)


def library_of(metric: Any) -> Library | None:
    """Return the library of a metric, or None if the object is not a metric."""
    return next((each for each in libraries() if each.is_metric(metric)), None)


def parts_of(root: Any) -> Iterator[Any]:
    """Yield an object and, for a model, all modules in it, in the same order in every process."""
    yield from root.modules() if isinstance(root, torch.nn.Module) else (root,)
    for library in libraries():
        yield from library.parts(root)
