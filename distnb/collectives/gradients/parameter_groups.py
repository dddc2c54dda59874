"""The mirrored parameters of one model that exist in this process, and the state of their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.algorithms.flat_packs import Slot
from distnb.compat import patches
from distnb.errors import GradientError

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync

__all__ = [
    "AGGREGATED",
    "Identity",
    "Mirror",
    "ParameterGroup",
    "find_mirror",
    "refuse_wrapping",
]


class AggregatedTensors:
    """The tensors that hold aggregated gradients, by identity. None of them is kept alive.

    The results of `ReplicaContext.all_reduce` are among them (copies are not), so that gradients which were made by
    `torch.autograd.grad` and aggregated by hand pass the optimizer's check.

    Attributes:
        identities: May be read directly where a call per tensor would cost too much: an entry is removed as soon as its
            tensor is freed, before another object can get its identity.
        serial: Counts the aggregations of this process.
        stepped: The value of `serial` when an optimizer last stepped.
    """

    def __init__(self) -> None:
        self.identities: dict[int, weakref.ref[torch.Tensor]] = {}
        self.serial = 0
        self.stepped = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Note that this tensor holds an aggregated gradient."""
        identity = id(tensor)
        if identity not in self.identities:
            forget = self.identities.pop
            self.identities[identity] = weakref.ref(tensor, lambda _: forget(identity, None))

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self.identities


AGGREGATED = AggregatedTensors()


@dataclass(frozen=True)
class Mirror:
    """The place of a mirrored parameter."""

    sync: weakref.ref[GradientSync]
    group: ParameterGroup
    place: int


_mirrors: dict[int, Mirror] = {}


def find_mirror(parameter: object) -> Mirror | None:
    """Return the place of a parameter made in a scope; None for all others, copies included (an EMA's, a deepcopy)."""
    return _mirrors.get(id(parameter))


def refuse_wrapping() -> None:
    """Make wrapping mirrored parameters in DistributedDataParallel raise GradientError from now on. Idempotent."""
    patches.wrap("torch.nn.parallel:DistributedDataParallel.__init__", _checked)


def _checked(original: Callable[..., None], wrapper: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    if isinstance(module, torch.nn.Module) and any(map(find_mirror, module.parameters())):
        raise GradientError(
            f"DistributedDataParallel was given a {type(module).__name__} that was made in a strategy's scope. Its "
            "gradients are aggregated already, and would be a second time. Use the model as it is; or, to use "
            "DistributedDataParallel, make it outside `with strategy.scope():`."
        )
    original(wrapper, module, *args, **kwargs)


class _Gone:
    """A placeholder for a parameter that no longer exists. It never has a gradient, whatever is set."""

    requires_grad = False
    dtype = None

    @property
    def grad(self) -> None:
        return None

    @grad.setter
    def grad(self, value: object) -> None:
        pass


_GONE: Any = _Gone()


def _nothing() -> None:
    """Return None, as the reference of a place that has no parameter on this replica."""


Identity = tuple[int, int]
"""A parameter group's identity on all replicas: the generation in which it was made, and its number there."""


class ParameterGroup:
    """The parameters of one model, in the order in which they were made. They are reduced together.

    The group does not keep parameters alive. A freed parameter keeps its place, so that the layout does not depend on
    when a replica's garbage collector runs.

    Attributes:
        identity: The same on every replica.
        key: A weak reference to the key that was passed to `GradientSync.register`.
        label: The name of the model or variable, for errors.
        references: The parameters, by place.
        params: During a backward pass, the parameters; else empty.
        aside: During a pass: the gradients from before it, by place.
        local: Places whose gradient is still this replica's own, made under `no_sync`.
        serial: The number of the last aggregation that this group took part in.
        versions: The number of writes to each parameter that were the same on all replicas, by place.
        versions_at_first: `versions` when the replicas last began with equal values.
        slots: The layout of each gradient that takes part, by place.
        layout_version: Grows when the slots may have changed.
        checked: Whether the replicas have compared the parameters' values.
        is_copied: Whether the parameters were copied from another replica since the replicas last met.
    """

    def __init__(
        self,
        sync: GradientSync,
        identity: Identity,
        key: Any,
        on_extinct: Callable[[ParameterGroup], None],
    ) -> None:
        self.identity = identity
        self.key = weakref.ref(key)
        self.label: str = key.label
        self.description = f"{self.label} {identity[1]}"
        self.references: list[Callable[[], torch.nn.Parameter | None]] = []
        self.params: list[torch.nn.Parameter] = []
        self.aside: dict[int, torch.Tensor] = {}
        self.local: set[int] = set()
        self.serial = 0
        self.versions: dict[int, int] = {}
        self.versions_at_first: dict[int, int] = {}
        self.slots: dict[int, Slot] = {}
        self.layout_version = 0
        self.checked = False
        self.is_copied = False
        self._sync = weakref.ref(sync)
        self._state: list[Any] = []
        self._alive = 0
        self._on_extinct = on_extinct

    def append(self, parameter: torch.nn.Parameter, place: int | None = None) -> None:
        """Add a parameter as the last one, or at its place on other replicas."""
        identity = id(parameter)
        place = len(self.references) if place is None else place
        mirrors = _mirrors  # as the interpreter ends, modules' names are gone before their objects

        def gone(_reference: object) -> None:
            mirrors.pop(identity, None)
            self._alive -= 1
            if not self._alive:
                self._on_extinct(self)

        reference = weakref.ref(parameter, gone)
        mirrors[identity] = Mirror(self._sync, self, place)
        self.references += [_nothing] * (place + 1 - len(self.references))
        earlier = self.references[place]()
        if earlier is not None:  # a copy that was received from another replica before, and still exists
            mirrors.pop(id(earlier), None)
            self._alive -= 1
        self.references[place] = reference
        self.layout_version += 1
        self._alive += 1

    def forget(self) -> None:
        """Stop mirroring the parameters."""
        for identity in [identity for identity, mirror in _mirrors.items() if mirror.group is self]:
            del _mirrors[identity]

    @property
    def is_trained(self) -> bool:
        """True if any parameter requires a gradient."""
        return any(parameter.requires_grad for each in self.references if (parameter := each()) is not None)

    def living(self) -> list[tuple[int, torch.nn.Parameter]]:
        """Return the parameters that exist, with their places."""
        found = [(place, reference()) for place, reference in enumerate(self.references)]
        return [(place, parameter) for place, parameter in found if parameter is not None and not is_lazy(parameter)]

    # During a pass ---------------------------------------------------------------------------------------

    def begin_pass(self) -> bool:
        """Hold the parameters and move existing gradients aside. Return whether they changed since the last pass."""
        found = [reference() for reference in self.references]
        params: list[Any] = [_GONE if parameter is None else parameter for parameter in found]
        self.params = params
        self.aside = {place: gradient for place, p in enumerate(params) if (gradient := p.grad) is not None}
        for place in self.aside:
            params[place].grad = None
        if self.local:
            # Except those that the user has set to None or to an aggregated gradient since.
            self.local = {place for place in self.local & self.aside.keys() if self.aside[place] not in AGGREGATED}
        state = [(parameter.requires_grad, parameter.dtype, type(parameter)) for parameter in params]
        if any(parameter is None for parameter in found):
            state = [(known if p is _GONE else new) for p, new, known in zip_longest(params, state, self._state)]
        if state == self._state:
            return False
        self._state = state
        self.layout_version += 1  # parameters are new, or were frozen, thawed, cast or materialised
        return True

    def fresh(self) -> list[torch.Tensor | None]:
        """Return the gradients that a pass made, by place."""
        return [parameter.grad for parameter in self.params]

    def contribution(self, place: int, fresh: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """Return this replica's part: the pass's gradient, scaled (by 0 to zeros), plus that accumulated under
        no_sync."""
        if fresh is not None and scale != 1.0:
            fresh = fresh * scale if scale else torch.zeros_like(fresh)
        if place not in self.local:
            return fresh
        return self.aside[place] if fresh is None else self.aside[place] + fresh

    def end_pass(self, *, failed: bool = False) -> None:
        """Restore gradients to which nothing was added (all if the pass failed), and release the parameters."""
        for place, parameter in enumerate(self.params) if failed else ():
            parameter.grad = self.aside.get(place)
        for place, before in self.aside.items():
            if self.params[place].grad is None:
                self.params[place].grad = before
        self.params = []
        self.aside = {}

    # Layout ----------------------------------------------------------------------------------------------

    def lay_out(self) -> dict[int, Slot]:
        """Return the layout of each gradient that can take part here, by place, after a pass."""
        slots = {}
        for place, parameter in enumerate(self.params):
            gradient, known = parameter.grad, self.slots.get(place)
            if parameter is _GONE or is_lazy(parameter) or not (parameter.requires_grad or gradient is not None):
                continue
            sparse = (gradient is not None and gradient.is_sparse) or (known is not None and known.sparse)
            slots[place] = Slot.like(parameter.detach(), sparse=sparse)
        return slots

    def agree(self, slots: dict[int, Slot]) -> None:
        """Adopt the layout of all replicas, in which parameters may take part that are gone here."""
        self.slots = slots
        self.checked = True
        missing = max(slots, default=-1) + 1 - len(self.references)
        self.references += [_nothing] * missing
        self.params += [_GONE] * missing

    def scan(self) -> tuple[bool, bool]:
        """Return whether a pass made gradients, and whether there are slots for all of them."""
        made, fits, slots = False, True, self.slots
        for place, parameter in enumerate(self.params):
            gradient = parameter.grad
            if gradient is not None:
                made = True
                slot = slots.get(place)
                fits = fits and slot is not None and (slot.sparse or not gradient.is_sparse)
        return made, fits
