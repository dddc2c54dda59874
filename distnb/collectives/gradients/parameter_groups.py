"""The mirrored parameters of one model, and what their gradients held before a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.gradients.flat_packing import Slot
from distnb.errors import GradientError

__all__ = ["ParameterGroup", "LocalPart"]


class _Gone:
    """Stands where a parameter was that no longer exists: it never has a gradient, whatever is set."""

    requires_grad = False

    @property
    def grad(self) -> None:
        return None

    @grad.setter
    def grad(self, value: object) -> None:
        pass


_GONE: Any = _Gone()


@dataclass
class LocalPart:
    """A `.grad` that holds something which no other replica has yet (made under `no_sync`).

    Attributes:
        grad: The tensor, by weak reference: setting `.grad = None` drops it as ever.
        base: The part of it that is already aggregated, where there is one.
        version: The tensor's version when we last wrote it.
    """

    grad: weakref.ref[torch.Tensor]
    base: torch.Tensor | None = None
    version: int = 0


class ParameterGroup:
    """Parameters that are reduced together: those of one model, in the order in which they were made.

    Nothing here keeps a parameter alive. A parameter that is gone keeps its place, so that a layout never
    depends on when a replica's garbage collector ran.

    Attributes:
        identity: (generation, number): nearly always the same on every replica.
        key: What this replica's adopter calls it; a module by a weak reference.
        number: Replica 0's number for it: the same on every replica once they have agreed.
        params: During a backward pass, the parameters; else empty.
        aside: During a pass: the gradients that were there before it, by place.
        local: Gradients with a part that is still this replica's own, by place.
        serial: The number of the last aggregation that this family had part in.
        unused: Places that had no gradient on any replica in that aggregation.
        tainted: Places whose gradient also holds something that was never aggregated, put there by hand.
        versions: How often each parameter was written to, as far as all replicas did so alike, by place.
        layout_version: Grows when the places, dtypes or shapes that take part change.
    """

    def __init__(
        self, identity: tuple[int, int], key: object, description: str, on_extinct: Callable[[ParameterGroup], None]
    ) -> None:
        self.identity = identity
        self.key = key
        self.number = identity[1]
        self.description = description
        self.references: list[weakref.ref[torch.nn.Parameter]] = []
        self.params: list[torch.nn.Parameter] = []
        self.aside: dict[int, torch.Tensor] = {}
        self.local: dict[int, LocalPart] = {}
        self.serial = 0
        self.unused: frozenset[int] = frozenset()
        self.tainted: set[int] = set()
        self.versions: dict[int, int] = {}
        self.layout_version = 0
        self.active: list[int] = []
        self.slots: list[Slot] = []
        self.sparse: set[int] = set()
        self.checked = False
        self._dtypes: list[torch.dtype] = []
        self._trainable: list[bool] = []
        self._unseen = False
        self.some_gone = False
        self._alive = 0
        self._on_extinct = on_extinct

    def append(self, parameter: torch.nn.Parameter) -> int:
        """Take a parameter in; returns its place."""
        self.references.append(weakref.ref(parameter, self._note_gone))
        self.layout_version += 1
        self._alive += 1
        return len(self.references) - 1

    def _note_gone(self, _reference: object) -> None:
        self.some_gone = True
        self._alive -= 1
        if self._alive == 0:
            self._on_extinct(self)

    @property
    def extinct(self) -> bool:
        """Whether every parameter is gone."""
        return self._alive == 0 and bool(self.references)

    def is_gone(self, place: int) -> bool:
        """During a pass: whether the parameter no longer exists."""
        return self.params[place] is _GONE

    # During a pass ---------------------------------------------------------------------------------------

    def set_aside(self) -> None:
        """Before a pass: hold the parameters, and move existing gradients out of its way."""
        params = [reference() for reference in self.references]
        if self.some_gone:
            params = [_GONE if parameter is None else parameter for parameter in params]
        self.params = params  # type: ignore[assignment]
        gradients = [parameter.grad for parameter in self.params]
        self.aside = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
        for place in self.aside:
            self.params[place].grad = None
        if self.local:
            self._drop_replaced_local_parts()

    def about_to_change(self) -> bool:
        """Before a pass: whether parameters were frozen, thawed or cast, as far as they themselves show it."""
        params = self.params
        if [parameter.requires_grad for parameter in params] != self._trainable:
            return True
        return [getattr(params[place], "dtype", None) for place in self.active] != self._dtypes

    def fresh(self) -> list[torch.Tensor | None]:
        """After a pass: the gradients that it made, by place."""
        return [parameter.grad for parameter in self.params]

    def with_local_part(
        self, place: int, fresh: torch.Tensor | None, scale: float, local_scale: float
    ) -> torch.Tensor | None:
        """This replica's whole contribution: the pass's gradient and what was gathered under no_sync, scaled."""
        part = self.local.get(place)
        scaled = None if fresh is None else fresh * scale if scale else torch.zeros_like(fresh)
        if part is None:
            return scaled
        before = self.aside[place]
        own = (before if part.base is None else before - part.base) * local_scale
        return own if scaled is None else own + scaled

    def restore(self) -> None:
        """Give every parameter the gradient that it had before the pass, whatever the pass made."""
        for place, parameter in enumerate(self.params):
            before = self.aside.get(place)
            if parameter.grad is not before:
                parameter.grad = before
        self.release()

    def release(self) -> None:
        """After a pass: hold nothing any more."""
        self.params = []
        self.aside = {}

    def _drop_replaced_local_parts(self) -> None:
        for place, part in list(self.local.items()):
            before = self.aside.get(place)
            if before is None:
                del self.local[place]  # set to None by the user: a new start
            elif part.grad() is not before:
                # Derived from the local one by the user (clipped, cast): as local as that was.
                if part.base is not None:
                    raise GradientError(_replaced(self, place))
                part.grad = weakref.ref(before)
            elif part.base is not None and before._version != part.version:
                if before.any():
                    raise GradientError(_replaced(self, place))
                part.base = None  # zero_grad(set_to_none=False)

    # Layout ----------------------------------------------------------------------------------------------

    def lay_out(self, fresh: list[torch.Tensor | None]) -> None:
        """Decide which parameters take part and how each looks, from their present state."""
        self.active = []
        self.slots = []
        for place, parameter in enumerate(self.params):
            gradient = fresh[place]
            if gradient is not None and gradient.is_sparse:
                self.sparse.add(place)
            if parameter is _GONE or is_lazy(parameter) or not (parameter.requires_grad or gradient is not None):
                continue
            self.active.append(place)
            self.slots.append(_slot(parameter, place in self.sparse))
        self._dtypes = [slot.dtype for slot in self.slots]
        self._trainable = [parameter.requires_grad for parameter in self.params]
        self._unseen = any(gradient is None for gradient in fresh)

    def layout_is_stale(self, fresh: list[torch.Tensor | None]) -> bool:
        """Whether parameters were frozen, thawed or cast since `lay_out`. Cheap: it runs every step."""
        if len(self.active) == len(fresh) and not self._unseen:
            present = [gradient for gradient in fresh if gradient is not None]
            if len(present) == len(fresh):
                return [gradient.dtype for gradient in present] != self._dtypes
        active = set(self.active)
        for place, parameter in enumerate(self.params):
            gradient = fresh[place]
            if place not in active:
                if gradient is not None or (parameter.requires_grad and not is_lazy(parameter)):
                    return True
            elif gradient is None:
                if parameter is not _GONE and not parameter.requires_grad:
                    return True
            elif gradient.is_sparse and place not in self.sparse:
                return True
        present = [gradient for gradient in (fresh[place] for place in self.active) if gradient is not None]
        expected = [slot.dtype for place, slot in zip(self.active, self.slots, strict=True) if fresh[place] is not None]
        return [gradient.dtype for gradient in present] != expected


def _slot(parameter: torch.nn.Parameter, sparse: bool) -> Slot:
    shape = tuple(parameter.shape)
    template = parameter.detach()
    stride = template.stride() if _is_dense(template) else torch.empty(shape, device="meta").stride()
    return Slot(shape, stride, template.dtype, template.device, sparse)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions (channels_last)."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def _replaced(family: ParameterGroup, place: int) -> str:
    return (
        f"The gradient of parameter {place} of {family.description} held an aggregated part when a backward pass under "
        "no_sync() added this replica's own part to it, and then it was changed by hand. Now the two parts cannot be "
        "told apart, and the aggregated one would be counted once per replica. Clip, scale or replace gradients after "
        "a backward pass outside no_sync(), or call optimizer.zero_grad() before the first pass under no_sync()."
    )
