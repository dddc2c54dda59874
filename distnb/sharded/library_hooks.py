"""Replacements of torch's functions for sharded models: of optimizers, gradients and sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.compat import patches, torch_internals
from distnb.errors import ContextError
from distnb.runtime import contexts
from distnb.runtime.this_process import this_process
from distnb.sharded.parts import part_of
from distnb.sharded.whole_copies import holds_shards

__all__ = ["install"]

_READS = ("numpy", "tolist", "item", "__array__", "__float__", "__int__", "__bool__")

_OPERATORS = tuple(f"__{place}{name}__" for name in ("add", "sub", "mul", "truediv") for place in ("", "r", "i"))


class _Handler(Protocol):
    """The runtime of a strategy that shards models."""

    def add_param_group(
        self, original: Callable[..., None], optimizer: torch.optim.Optimizer, param_group: dict[str, Any]
    ) -> None:
        """Handle the addition of parameters to an optimizer."""

    def zero_grad(self, original: Callable[..., None], owner: Any, *args: Any, **kwargs: Any) -> None:
        """Handle a call of the method `zero_grad` of an optimizer or a module."""

    def full_tensor(
        self, original: Callable[..., torch.Tensor], tensor: DTensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Gather a sharded tensor."""


def install(handler: _Handler) -> None:
    """Install the replacements for one strategy's runtime."""
    patches.wrap("torch.optim:Optimizer.add_param_group", handler.add_param_group)
    patches.wrap("torch.optim:Optimizer.zero_grad", handler.zero_grad)
    patches.wrap("torch.nn:Module.zero_grad", handler.zero_grad)
    patches.wrap("torch.distributed.tensor:DTensor.full_tensor", handler.full_tensor)
    patches.replace("torch.distributed.tensor:DTensor.data", property(torch_internals.plain_data.__get__, _set_data))
    patches.wrap("torch.distributed.tensor:DTensor.__format__", _format)
    for target in ("torch.nn.utils.clip_grad:_get_total_norm", "torch.nn.utils:get_total_norm"):
        patches.wrap(target, _total_norm)
    patches.wrap("torch.nn.utils.clip_grad:_has_foreach_support", _has_foreach_support)
    patches.wrap("torch.amp.grad_scaler:GradScaler._unscale_grads_", _unscale)
    for name in _OPERATORS:
        patches.replace(f"torch.distributed.tensor:DTensor.{name}", _of_whole_number(name))
    for name in _READS:
        patches.replace(f"torch.distributed.tensor:DTensor.{name}", _of_whole(name))


def _set_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Replace a sharded tensor's part. torch would replace only what the tensor says about it.

    Raises:
        ContextError: The value has another shape, or is divided in another way.
    """
    if isinstance(value, DTensor) and value.shape == tensor.shape and value.placements == tensor.placements:
        torch_internals.replace_local(tensor, value)
    elif not isinstance(value, DTensor) and value.shape == tensor.shape:
        torch_internals.replace_local(tensor, part_of(value, tensor))
    else:
        raise ContextError(
            f"`.data` of a sharded tensor of shape {list(tensor.shape)} was assigned a tensor of shape "
            f"{list(value.shape)}. Assign a tensor of the same shape, whole or divided in the same way."
        )


def _format(original: Callable[..., str], tensor: DTensor, spec: str) -> str:
    """Format a number as torch formats other tensors without dimensions."""
    return format(tensor.full_tensor(), spec) if not tensor.dim() else original(tensor, spec)


def _total_norm(
    original: Callable[..., torch.Tensor], tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Compute the norm of sharded and other tensors together, with one collective.

    torch stacks the norms of both kinds, which fails, and has no infinity norm of a replica that has no rows.
    """
    listed: list[Any] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    sharded = [each for each in listed if holds_shards(each)]
    if not sharded:
        return original(listed, norm_type, *args, **kwargs)
    contexts.require_all_replicas()
    order = float(norm_type)
    with torch.no_grad():
        powers = [_power_of_norm(torch_internals.local_tensor(each), order) for each in sharded]
        norms = torch.stack(
            [each.to(max((each.dtype for each in powers), key=lambda dtype: dtype.itemsize)) for each in powers]
        )
        process = this_process.replica
        if process is not None and process.size > 1:
            process.group.all_reduce(norms, {float("inf"): "max", -float("inf"): "min"}.get(order, "sum"))
        if 0 < abs(order) < float("inf"):
            copies = [each.device_mesh.size() // each.device_mesh.size(-1) for each in sharded]  # in hybrid sharding
            norms = (norms / norms.new_tensor(copies)) ** (1 / order)
    wholes = [each for each in listed if not holds_shards(each)]
    return original([*norms.unbind(), *wholes], norm_type, *args, **kwargs)


def _power_of_norm(part: torch.Tensor, order: float) -> torch.Tensor:
    """Return what a replica's part of a tensor contributes to the tensor's norm."""
    dtype = part.abs().dtype if part.is_complex() else part.dtype
    dtype = dtype if dtype.itemsize > 2 else torch.float32
    if not part.numel():
        return part.new_full((), float("inf") if order == -float("inf") else 0.0, dtype=dtype)
    if order == 2 and not part.is_complex():
        flat = part.to(dtype).flatten()
        return torch.dot(flat, flat)
    norm: torch.Tensor = torch.linalg.vector_norm(part, order, dtype=None if part.is_complex() else dtype)
    return norm.pow(order) if 0 < abs(order) < float("inf") else norm


def _has_foreach_support(original: Callable[..., bool], tensors: Sequence[Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether torch can handle tensors in one operation."""
    return len({isinstance(each, DTensor) for each in tensors}) < 2 and original(tensors, *args, **kwargs)


def _unscale(
    original: Callable[..., dict[Any, torch.Tensor]],
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    *args: Any,
    **kwargs: Any,
) -> dict[Any, torch.Tensor]:
    """Unscale the gradients of sharded parameters, and then the others. torch's function takes one kind only."""
    parameters = optimized(optimizer)
    kinds = [[each for each in parameters if holds_shards(each) is kind] for kind in (True, False)]
    found: dict[Any, torch.Tensor] = {}
    for given in filter(None, kinds):
        for device, is_found in original(scaler, _Params([{"params": given}]), *args, **kwargs).items():
            found[device] = torch.maximum(found[device], is_found) if device in found else is_found
    return found


class _Params(NamedTuple):
    param_groups: list[dict[str, Any]]


@functools.cache
def _of_whole(name: str) -> Callable[..., Any]:
    """Return a method that calls the method of that name of the whole tensor, which all replicas gather.

    torch raises an error instead, or converts this replica's part to a number.
    """

    def method(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor.full_tensor(), name)(*args, **kwargs)

    return method


@functools.cache
def _of_whole_number(name: str) -> Callable[..., Any]:
    """Return an operator that gathers a sharded number if its other operand is an ordinary tensor.

    torch would compute a sharded number, and fail in the backward pass.
    """
    plain, of_whole = getattr(torch.Tensor, name), getattr(torch.Tensor, name.replace("__i", "__"))

    def operator(tensor: DTensor, other: Any) -> Any:
        is_mixed = isinstance(other, torch.Tensor) and not isinstance(other, DTensor)
        if is_mixed and not tensor.dim() and holds_shards(tensor):
            return of_whole(tensor.full_tensor(), other)
        return plain(tensor, other)

    return operator
