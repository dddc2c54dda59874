"""The references in a pickled closure, and the functions that its pickle calls to resolve them on a worker.

The coordinator pickles a resource as a call: `open_resource(7)`. On a worker the engine's runner registers itself with
`open_by` before it unpickles a closure, and the call returns the worker's own object number 7.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from distnb.servers.coordinator.libraries import parts_of
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.server_variable import ServerVariable, represent
from distnb.servers.variables.shard_placement import Stored

__all__ = [
    "Reach",
    "ResourceOpener",
    "current_worker",
    "open_by",
    "open_copy",
    "open_input",
    "open_module",
    "open_representative",
    "open_resource",
    "parameters_of_each",
]


class Reach(NamedTuple):
    """The resources, and the variables on the servers, that are opened along with an object."""

    resources: set[int]
    variables: set[int]


class ResourceOpener(Protocol):
    """A worker's objects for resources.

    Attributes:
        access: The variables on the servers.
        worker: The worker's index.
        reach: The resources and variables that were opened so far.
    """

    access: ServerAccess
    worker: int
    reach: Reach

    def resource(self, number: int) -> Any:
        """Return this worker's own object, made at its first use."""

    def input(self, number: int) -> Any:
        """Return another closure's result."""


_opener: ResourceOpener


def open_by(opener: ResourceOpener) -> None:
    """Let the closures that are opened from now on find their resources in `opener`."""
    global _opener
    _opener = opener


def current_worker() -> int:
    """Return the index of the worker that this process is, in which a closure is opened or runs."""
    return _opener.worker


def parameters_of_each(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Return the parameters of each of some modules, in order. `Module.parameters` checks more, and takes longer."""
    return (each for module in modules for each in module._parameters.values() if each is not None)


def open_resource(number: int) -> Any:
    """Return this worker's object for a resource."""
    return _opener.resource(number)


def open_input(number: int) -> Any:
    """Return another closure's result."""
    return _opener.input(number)


def open_module(number: int, place: int) -> Any:
    """Return a part of a model, by its index among the parts."""
    return next(itertools.islice(parts_of(_opener.resource(number)), place, None))


def open_copy(stored: Stored, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    """Return this worker's copy of a parameter or buffer."""
    _opener.reach.variables.add(stored.number)
    return _opener.access.copies.opened_copy(stored, is_parameter=is_parameter).requires_grad_(requires_grad)


def open_representative(stored: Stored, settings: Any, strategy: Any, rows_apart: bool, sparse: bool) -> ServerVariable:
    """Return this worker's representative of a variable on the servers."""
    access = _opener.access
    _opener.reach.variables.add(stored.number)  # it is read with others if it has a copy here
    variable = access.representatives.get(stored)
    if variable is None:
        variable = access.representatives[stored] = represent(stored, settings, strategy, rows_apart=rows_apart)
    variable.sparse_gradients = sparse
    return variable
