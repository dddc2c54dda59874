"""Descriptions of values by the process that holds them: small trees of facts, which another process draws."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from distnb.collectives.digests import digest_of_text
from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.compat import torch_internals
from distnb.objects.memory.blocks import dense_tensor, is_stored
from distnb.runtime.inspection.images import picture_of, tensor_picture
from distnb.runtime.inspection.statistics import MOST_ELEMENTS, digest_of, local_part, norms, statistics_of
from distnb.runtime.scopes.registration import is_scope_buffer
from distnb.values import DistributedValues, structure
from distnb.wire.value_facts import VALUE, Inspected

__all__ = ["as_tensor", "device_of", "displayed", "inspect", "optimizer_state", "report"]

_MOST_TENSORS = 24  # tensors with statistics; further ones have only type, shape, dtype, device and size
_MOST_ITEMS = 60  # items of one container
_MOST_PARTS = 500  # items of all containers
_MOST_PICTURES = 4
_DEEPEST = 8
_FEW_ELEMENTS = 64
_MOST_CHARACTERS = 600


def inspect(value: Any) -> Inspected:
    """Describe a value. The work is bounded, nothing is sent, and other replicas need not take part."""
    return _Inspection().value(value, 0)


def report(value: DistributedValues) -> dict[str, Any]:
    """Describe this process's components of a distributed value, with their replica numbers, for another to draw."""
    components = dict(zip(value.replica_ids, map(inspect, value.values), strict=True))
    return {"kind": type(value).__name__, "size": value.num_replicas, "replicas": components}


def displayed(value: DistributedValues) -> dict[str, Any]:
    """Return the data, by MIME type, that IPython's `display` shows for a distributed value on a replica."""
    return {VALUE: report(value), "text/plain": repr(value)}


class _Inspection:
    def __init__(self) -> None:
        self._tensors = _MOST_TENSORS
        self._parts = _MOST_PARTS
        self._pictures = _MOST_PICTURES

    def value(self, value: Any, depth: int) -> Inspected:
        if isinstance(value, DistributedValues) and len(value.values) == 1:
            value = value.values[0]
        tensor = as_tensor(value)
        if tensor is not None:
            return self._tensor(value, tensor)
        if isinstance(getattr(type(value), "metric_state", None), property):
            return self._metric(value, depth)
        if isinstance(value, torch.nn.Module):
            return _module(value)
        if isinstance(value, torch.optim.Optimizer):
            state = optimizer_state(value)
            return self._container(value, structure.children(state) or [], depth)._replace(text=_groups_of(value))
        if depth < _DEEPEST and (children := structure.children(value, _MOST_ITEMS)) is not None:
            return self._container(value, children, depth)
        picture = self._picture_of(value)
        text = short_text(value)
        # A text that has the object's address, or is cut off, does not represent the content: no digest to compare.
        content = 0 if f" at {id(value):#x}" in text or len(text) >= _MOST_CHARACTERS else digest_of_text(text)
        if picture:
            text, content = "", digest_of_text(picture)
        return Inspected(type=type_name(value), text=text, content=content, picture=picture)

    def _picture_of(self, value: Any) -> str:
        with contextlib.suppress(Exception):  # a figure's artists run user code
            picture = picture_of(value) if self._pictures else ""
            self._pictures -= bool(picture)
            return picture
        return ""

    def _tensor(self, value: Any, tensor: torch.Tensor) -> Inspected:
        facts = _facts(value, tensor)
        if tensor.is_meta or (dense_tensor(tensor) and not is_stored(tensor)):
            return facts._replace(note="without memory")
        if not self._tensors:
            return facts
        self._tensors -= 1
        picture = tensor_picture(tensor) if self._pictures else ""
        self._pictures -= bool(picture)
        few = tensor.numel() <= _FEW_ELEMENTS
        gradient = value.grad if isinstance(value, torch.Tensor) and value.is_leaf else None
        return facts._replace(
            text=elements(tensor) if few else "",
            content=digest_of(tensor),
            statistics=statistics_of(tensor),
            picture=picture,
            gradient_norm=None if gradient is None else norms([local_part(gradient)])[0],
        )

    def _metric(self, metric: Any, depth: int) -> Inspected:
        """Describe a metric by its states, which differ between replicas until the metric is read."""
        found = self._container(metric, structure.children(dict(metric.metric_state)) or [], depth)
        items = tuple((name, each._replace(content=0)) for name, each in found.items)
        return found._replace(text="", content=0, items=items, note="each replica's own states, put together when read")

    def _container(self, value: Any, children: list[tuple[str, Any]], depth: int) -> Inspected:
        shown = children[: min(_MOST_ITEMS, self._parts)]
        self._parts -= len(shown)
        items = tuple((name, self.value(child, depth + 1)) for name, child in shown)
        contents = [child.content for _, child in items]
        count = len(value) if isinstance(value, list | tuple) else len(children)
        whole = count == len(shown) and all(contents)
        return Inspected(
            type=type_name(value),
            text=f"{count} item{'s' * (count != 1)}",
            nbytes=sum(child.nbytes for _, child in items),
            content=digest_of_text(repr(contents)) if whole else 0,
            items=items,
            left_out=count - len(shown),
        )


# -- modules -----------------------------------------------------------------------------------------------------------


def _module(module: torch.nn.Module) -> Inspected:
    """Describe a module by its layers. The norms of all parameters and gradients are read from the device at once."""
    named = dict(_named_tensors(module))
    tensors = {name: local_part(tensor) for name, tensor in named.items()}
    gradients = {name: local_part(each.grad) for name, each in named.items() if each.grad is not None}
    total = sum(tensor.numel() for tensor in tensors.values())
    most = max(1024, MOST_ELEMENTS // len(tensors)) if total > MOST_ELEMENTS else MOST_ELEMENTS
    found = norms([*tensors.values(), *gradients.values()], most)
    of_gradients = dict(zip(gradients, found[len(tensors) :], strict=True))
    leaves = {}
    for (name, tensor), norm in zip(tensors.items(), found, strict=False):
        trained = isinstance(named[name], torch.nn.Parameter)
        leaves[name] = _facts(named[name], tensor)._replace(
            content=0 if is_scope_buffer(named[name]) else digest_of(tensor, most),
            parameters=named[name].numel() if trained else 0,
            norm=None if tensor.is_meta else norm,
            gradient_norm=of_gradients.get(name),
            note="" if named[name].requires_grad else "frozen" if trained else "buffer",
        )
    inspected = _layer(module, "", leaves, 0)
    sampled = "norms of a sample; " if most < MOST_ELEMENTS else ""
    return inspected._replace(note=f"{sampled}{'training' if module.training else 'evaluation'} mode")


def _named_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, each) for name, each in tensors if not torch.nn.parameter.is_lazy(each)]


def _layer(module: torch.nn.Module, path: str, leaves: Mapping[str, Inspected], depth: int) -> Inspected:
    own = [
        (name, leaf)
        for full, leaf in leaves.items()
        if (name := full.removeprefix(path)) and full.startswith(path) and "." not in name
    ]
    layers = [
        (name, _layer(child, f"{path}{name}.", leaves, depth + 1))
        for name, child in module.named_children()
        if depth < _DEEPEST
    ]
    items = [*layers, *own]
    # `named_parameters` lists the tensors of a layer that is used twice only at their first place, so sums count them
    # once.
    below = [leaf for full, leaf in leaves.items() if full.startswith(path)]
    return Inspected(
        type=type(module).__name__,
        text=_settings_of(module),
        device=", ".join(dict.fromkeys(leaf.device for leaf in below)),
        nbytes=sum(leaf.nbytes for leaf in below),
        content=digest_of_text(repr([leaf.content for leaf in below])),
        items=tuple(items[:_MOST_ITEMS]),
        left_out=max(0, len(items) - _MOST_ITEMS),
        parameters=sum(leaf.parameters for leaf in below),
        norm=_together(leaf.norm for leaf in below if leaf.parameters),
        gradient_norm=_together(leaf.gradient_norm for leaf in below),
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return this process's state of an optimizer, by the place of each parameter that it has stepped."""
    parameters = optimized(optimizer)
    return {place: dict(optimizer.state[each]) for place, each in enumerate(parameters) if each in optimizer.state}


def _groups_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the learning rates of an optimizer's parameter groups, such as `lr 0.01 | lr 0.001`."""
    return " | ".join(f"lr {group['lr']}" for group in optimizer.param_groups if "lr" in group)


def _settings_of(module: torch.nn.Module) -> str:
    if isinstance(module, (torch.nn.ParameterDict, torch.nn.ParameterList)):
        return ""  # its text lists the parameters, which are drawn one by one
    try:
        return str(module.extra_repr())[:80]
    except Exception:  # noqa: BLE001  # a user's `extra_repr` may raise anything
        return ""


def _together(parts: Iterable[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return math.hypot(*known) if known else None


# -- pieces ------------------------------------------------------------------------------------------------------------


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return this process's part of a tensor or a numeric array as a tensor, or None for other values."""
    if isinstance(value, torch.Tensor):
        return None if torch.nn.parameter.is_lazy(value) else local_part(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        with contextlib.suppress(TypeError, ValueError):
            return local_part(torch.from_numpy(numpy.array(value, copy=True) if _is_odd(value) else value))
    return None


def _is_odd(array: Any) -> bool:
    """Return whether torch refuses an array's memory or warns about it."""
    return not array.flags.writeable or not array.dtype.isnative or any(stride < 0 for stride in array.strides)


def _facts(value: Any, tensor: torch.Tensor) -> Inspected:
    return Inspected(
        type=type_name(value),
        shape=str(tuple(value.shape)),
        dtype=str(value.dtype).removeprefix("torch."),
        device=device_of(value),
        nbytes=tensor.numel() * tensor.itemsize,
        note=f"this part: {tuple(tensor.shape)}" if torch_internals.local_tensor(value) is not None else "",
    )


def device_of(value: Any) -> str:
    """Return the device of a tensor or an array."""
    return str(getattr(value, "device", "cpu"))


def elements(tensor: torch.Tensor) -> str:
    """Return a tensor's elements as text."""
    if not tensor.dim():
        return f"{tensor.item():.6g}" if tensor.is_floating_point() else str(tensor.item())
    text: str = torch_internals.elements_as_text(tensor.cpu(), 0)
    return text if len(text) <= 2 * _MOST_CHARACTERS else text[: 2 * _MOST_CHARACTERS] + "…"


def short_text(value: Any) -> str:
    """Return a value's repr, cut off if it is long."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # a user's `__repr__` may raise anything
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def type_name(value: Any) -> str:
    """Return the name of a value's class."""
    return type(value).__name__
