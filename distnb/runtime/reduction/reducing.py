"""The implementation of `reduce` and `all_reduce`, with and without replicas: checks, conversions and reductions."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.collectives.algorithms.sums import all_reduce, combine, is_sparse, wire_dtype
from distnb.collectives.gradients.parameter_groups import AGGREGATED
from distnb.errors import CollectiveMismatchError, DistributedValueError, OptionError
from distnb.options import ReduceOp
from distnb.values.structure import flatten, unflatten

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation

__all__ = [
    "all_reduce_tree",
    "checked_axis",
    "broadcastable_weight",
    "plain_value_error",
    "reduce_alone",
    "reduce_leaves",
    "reduce_numbers",
    "tensor_of",
]


# bool is a subclass of int, so it comes first.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def tensor_of(value: Any, method: str, device: torch.device | None = None, *, sparse: bool = False) -> torch.Tensor:
    """Convert a leaf that is a tensor, an array or a number to a tensor.

    Args:
        value: The leaf.
        method: The name of the user's call, for errors.
        device: The device for numbers. Tensors and arrays are not moved. None: the CPU.
        sparse: Whether sparse (COO) tensors are accepted.

    Raises:
        DistributedValueError: The leaf is of another type.
        NotImplementedError: The leaf is a tensor of a layout that is not accepted.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided and not (sparse and is_sparse(value)):
            raise NotImplementedError(
                f"{method} takes dense tensors and got a {value.layout} one. Use value.to_dense()."
            )
        return value
    for kind, dtype in _DTYPES.items():
        if isinstance(value, kind):
            return torch.tensor(value, dtype=dtype, device=device or "cpu")
    if hasattr(value, "__array__"):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise DistributedValueError(
        f"{method} takes tensors, arrays and numbers, alone or in nested structures, and got a "
        f"{type(value).__name__}: {_shown(value)}. "
        "strategy.local_results(value) gives components of any type."
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def plain_value_error(op: ReduceOp, value: Any, num_replicas: int) -> DistributedValueError:
    """Return the error for a plain value that was passed to `reduce`, which expects components."""
    return DistributedValueError(
        f"reduce {op.name} over {num_replicas} replicas got a plain value, the same on all of them: "
        f"{_shown(value)}. It combines the PerReplica values that strategy.run "
        "returns. If a function returns the same Python number on all replicas, strategy.run returns a plain value. "
        "Return a tensor to get a PerReplica. If you want the sum, multiply by strategy.num_replicas_in_sync."
    )


def _python_number(tensor: torch.Tensor, value: Any) -> Any:
    """Return a result as a Python number if the value was one, else as a tensor."""
    return tensor.item() if isinstance(value, numbers.Number) and tensor.ndim == 0 else tensor


def _summand(
    value: Any, op: ReduceOp, method: str, device: torch.device | None = None, *, sparse: bool = False
) -> torch.Tensor:
    """Return a leaf as a tensor that can be summed and, for a mean, divided."""
    tensor = tensor_of(value, method, device, sparse=sparse)
    if tensor.dtype is torch.bool:
        raise DistributedValueError(
            f"{method} {op.name} of booleans is not defined. Convert them first: value.long() for counts, "
            "value.float() for fractions."
        )
    is_exact = op is ReduceOp.SUM or tensor.is_floating_point() or tensor.is_complex()
    return tensor if is_exact else tensor.to(torch.float64)


def checked_axis(axis: object, tensor: torch.Tensor, method: str) -> int:
    """Return an axis counted from 0.

    Raises:
        OptionError: The axis is not a whole number, is out of range, or the tensor has no axes.
    """
    if isinstance(axis, bool) or not isinstance(axis, int):
        wanted = "axis=None, a whole number, or a tuple of them," if method == "reduce" else "one whole number as axis"
        raise OptionError(f"{method} needs {wanted} and got {axis!r}.")
    if tensor.ndim == 0:
        other = "use axis=None to combine the replicas only" if method == "reduce" else "use reduce"
        raise OptionError(
            f"{method} along axis {axis}: the value is a scalar on each replica and has no axis. Add one first "
            f"(value.reshape(1)), or {other}."
        )
    if not -tensor.ndim <= axis < tensor.ndim:
        raise OptionError(
            f"{method} along axis {axis}: the value has shape {tuple(tensor.shape)}, so axis must be in "
            f"[{-tensor.ndim}, {tensor.ndim})."
        )
    return axis % tensor.ndim


def _axes_of(axis: Any, tensor: torch.Tensor) -> tuple[int, ...]:
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(sorted({checked_axis(one, tensor, "reduce") for one in axes}))


def reduce_alone(op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduce a leaf of the only replica: return it unchanged for axis=None, else reduce along the axes."""
    if axis is None:
        if value is not None and not isinstance(value, (str, bytes)):
            _summand(value, op, "reduce", sparse=True)  # raises for booleans and such
        return value
    tensor = _summand(value, op, "reduce")
    axes = _axes_of(axis, tensor)
    if not axes:
        return tensor
    return tensor.sum(axes, dtype=tensor.dtype) if op is ReduceOp.SUM else tensor.mean(axes)


def reduce_leaves(
    aggregation: Aggregation, op: ReduceOp, values: Sequence[Any], axis: Any, device: torch.device
) -> list[Any]:
    """Combine this replica's components of several leaves with the other replicas', and reduce along axes if given."""
    tensors = [_summand(value, op, "reduce", device, sparse=axis is None) for value in values]
    if axis is None:
        results = _reduce_elements(aggregation, op, tensors)
    else:
        results = _reduce_along(aggregation, op, tensors, axis)
    return [_python_number(result, value) for result, value in zip(results, values, strict=True)]


def reduce_numbers(op: ReduceOp, components: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the result of `reduce_leaves` for scalars, computed from all replicas' components in this process."""
    with torch.no_grad():
        results = []
        for tensors in components:
            dtype = _summand(tensors[0], op, "reduce").dtype
            wire = dtype if dtype.is_complex else wire_dtype(dtype, len(components) > 1)
            total = functools.reduce(operator.add, tensors if dtype is wire else [each.to(wire) for each in tensors])
            if op is ReduceOp.MEAN:
                total = total / len(tensors)
            results.append(total if total.dtype is dtype else total.to(dtype))
        return results


def _reduce_elements(aggregation: Aggregation, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return combine(aggregation, op, tensors)
    except CollectiveMismatchError as error:
        shapes = [tuple(tensor.shape) for tensor in tensors if tensor.ndim]
        if shapes:
            error.args = (
                f"{error} reduce with axis=None combines components of equal shape element by element; here "
                f"{'it' if len(tensors) == 1 else 'one'} has shape {shapes[0]}. If the components are slices of "
                f'unequal length, also reduce along the examples: strategy.reduce("{op.name.lower()}", value, axis=0).',
            )
        raise


def _reduce_along(
    aggregation: Aggregation, op: ReduceOp, tensors: Sequence[torch.Tensor], axis: Any
) -> list[torch.Tensor]:
    sums, counts = [], []
    for tensor in tensors:
        axes = _axes_of(axis, tensor)
        single = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
        sums.append(tensor.detach().sum(axes, dtype=single) if axes else tensor.detach())
        counts.append(math.prod(tensor.shape[one] for one in axes))
    if op is ReduceOp.SUM:
        totals = combine(aggregation, ReduceOp.SUM, sums)
        return [total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]
    # Send the counts with the sums, because replicas may hold different numbers of examples.
    weights = [
        torch.tensor(count, dtype=torch.float64, device=tensor.device)
        for count, tensor in zip(counts, tensors, strict=True)
    ]
    totals = combine(aggregation, ReduceOp.SUM, [*sums, *weights])
    pairs = zip(totals[: len(sums)], totals[len(sums) :], tensors, strict=True)
    return [(total / weight).to(tensor.dtype) for total, weight, tensor in pairs]


def all_reduce_tree(aggregation: Aggregation, op: ReduceOp, tree: Any) -> Any:
    """Reduce all leaves over the replicas together. None stays None, because unused parameters have such gradients."""
    every, shape = flatten(tree)
    places = [place for place, leaf in enumerate(every) if leaf is not None]
    if not places:
        return tree
    device = torch_device(aggregation.group.device)
    tensors = [_summand(every[place], op, "all_reduce", device, sparse=True) for place in places]
    # The same leaves must be None on all replicas. Otherwise one replica's leaf would be added to another leaf.
    layout = None if len(places) == len(every) else places
    for place, result in zip(places, all_reduce(aggregation, op, tensors, layout), strict=True):
        AGGREGATED.add(result)
        every[place] = _python_number(result, every[place])
    return unflatten(shape, every)


def broadcastable_weight(sample_weight: Any, values: torch.Tensor, method: str, what: str) -> torch.Tensor:
    """Return weights in Keras's format, reshaped so that they broadcast to the values without enlarging them.

    Weights broadcast from the left: weights `[batch]` become `[batch, 1]` for values `[batch, time]`. A last axis of
    size 1 that the values do not have is dropped.

    Args:
        sample_weight: The weights.
        values: The values that the weights apply to.
        method: The name of the user's call, for errors.
        what: A description of the values, for errors.

    Raises:
        OptionError: The weights do not fit the values.
    """
    weight = torch.as_tensor(sample_weight, dtype=values.dtype, device=values.device)
    given = weight.shape
    if weight.ndim == values.ndim + 1 and given[-1] == 1:
        weight = weight.squeeze(-1)
    elif 0 < weight.ndim < values.ndim:
        weight = weight.reshape(*given, *[1] * (values.ndim - weight.ndim))
    sizes = [1] * (values.ndim - weight.ndim) + list(weight.shape)
    if len(sizes) > values.ndim or any(one not in (1, size) for one, size in zip(sizes, values.shape, strict=True)):
        raise OptionError(
            f"{method} got sample_weight of shape {list(given)} for {what} of shape {list(values.shape)}. Give one "
            "weight for each of them, one for each example, or a number. Weights cannot enlarge the values."
        )
    return weight
