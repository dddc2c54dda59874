"""Detection of a mean loss under summed gradients, where the mean of every replica would count in full; and of a sum
over rows where replicas' losses are averaged.

The search covers the end of the autograd graph, from the loss to the first tensors that are not scalars. Means inside
the model (pooling, normalisation) are further away and are never reached.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from distnb.collectives.verify import callsite
from distnb.compat.torch_internals import saved, shapes_of_outputs
from distnb.errors import GradientError, MeanLossError

__all__ = ["MeanLossCheck", "is_sum_over_rows"]

_MEAN, _SUM = 1, 2  # ATen's numbers for `reduction=`
_MAX_NODES = 256
_LISTS_OF_SCALARS = ("StackBackward0", "CatBackward0")


class MeanLossCheck:
    """A check that runs once for each kind of backward pass: each line of the program and each kind of root."""

    def __init__(self) -> None:
        self._seen: set[tuple[bytes, tuple[type, ...]]] = set()

    def check(
        self, roots: Sequence[Any], replicas: int, slice_size: int | None, batch_size: int | None
    ) -> GradientError | None:
        """Return the error to raise if a pass from these roots reaches mirrored parameters.

        It is None if the loss is not a mean, or if this kind was checked before. The sizes of this replica's slice and
        of the whole batch may be unknown.
        """
        site = callsite.current()
        key = (site.identity, tuple([type(getattr(root, "grad_fn", None)) for root in roots]))
        if key in self._seen:
            return None
        for root in roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1 and root.grad_fn is not None:
                operation = _unscaled_mean(root.grad_fn, replicas, slice_size, batch_size)
                if operation is not None:
                    return MeanLossError(
                        f"The loss at {site} is {operation}: a mean over this replica's slice of the "
                        f"batch. Gradients of mirrored parameters are summed over the {replicas} replicas, so every "
                        f"step would be about {replicas} times too large. Either scale the loss by the global batch: "
                        "take the loss per example (reduction='none') and "
                        "distnb.nn.compute_average_loss(per_example, global_batch_size=...), with "
                        "distnb.nn.scale_regularization_loss for terms that do not depend on the batch. Or keep the "
                        "mean and have gradients averaged: MirroredStrategy(gradient_reduction='mean'), "
                        "`%%distribute mirrored --gradients mean`. If the loss is meant as it is, divide it by the "
                        "number of replicas, or switch this check off: MirroredStrategy(check_mean_loss=False)."
                    )
        self._seen.add(key)
        return None


def is_sum_over_rows(loss: torch.Tensor, rows: int) -> bool:
    """Return whether a loss has a term that is a sum over the rows of a batch and is not divided by their number."""
    if loss.grad_fn is None or rows < 2:
        return False
    for node, factors in _scalars(loss.grad_fn):
        shape = tuple(saved(node, "self_sym_sizes", ()))
        if shape[:1] == (rows,) and (node.name().startswith("SumBackward") or saved(node, "reduction") == _SUM):
            counts = (rows, math.prod(shape))
            scaled = any(math.isclose(f, 1 / n, rel_tol=1e-6) for f in (*factors, math.prod(factors)) for n in counts)
            if not scaled and not _is_of_parameter(node, shape):
                return True
    return False


def _is_of_parameter(node: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a node's input is a function of each element of a parameter."""
    below = {function for function, _ in node.next_functions if function is not None}
    while len(below) == 1:
        function = below.pop()
        if hasattr(function, "variable"):
            return tuple(function.variable.shape) == shape
        below = {following for following, _ in function.next_functions if following is not None}
    return False


def _unscaled_mean(root: Any, replicas: int, slice_size: int | None, batch_size: int | None) -> str | None:
    """Describe the first mean among the scalars of a graph that is not scaled for the replicas."""
    scales = [1 / replicas, *([1 / batch_size] if batch_size else [])]
    for node, factors in _scalars(root):
        candidates = (*factors, math.prod(factors))
        if not any(math.isclose(factor, scale, rel_tol=1e-3) for factor in candidates for scale in scales):
            operation = _mean(node, factors, slice_size, batch_size)
            if operation is not None:
                return operation
    return None


def _scalars(root: Any) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """Yield the nodes of a graph from its root to the first tensors that are not scalars, with the constant factors
    between them and the root.
    """
    waiting: list[tuple[Any, tuple[float, ...]]] = [(root, ())]
    visited: set[tuple[Any, tuple[float, ...]]] = set()
    while waiting and len(visited) < _MAX_NODES:
        node, factors = waiting.pop()
        if (node, factors) in visited or _extent(node) != 1:
            continue
        visited.add((node, factors))
        yield node, factors
        waiting.extend(_inputs(node, factors))


def _mean(node: Any, factors: tuple[float, ...], slice_size: int | None, batch_size: int | None) -> str | None:
    """Describe a node if it is a mean over a batch, or a sum divided by the size of one."""
    name = node.name()
    if name.startswith("MeanBackward"):
        return "made by mean()" if _reduces_batch(node) else None
    reduction = saved(node, "reduction")
    if reduction == _MEAN:
        return f"made by {_function(name)} with reduction='mean'"
    # A divisor can only be compared with the global batch size if that is known.
    if batch_size and (reduction == _SUM or name.startswith("SumBackward")):
        summands = math.prod(saved(node, "self_sym_sizes", ()))
        counts = [(summands, "the number of summands")]
        if slice_size != batch_size:
            counts.insert(0, (slice_size or 0, "the size of this replica's slice"))
        for count, what in counts:
            if count > 1 and any(math.isclose(factor, 1 / count, rel_tol=1e-6) for factor in factors):
                return f"a sum divided by {count}, {what}"
    return None


def _extent(node: Any) -> int:
    """Return the number of elements of a node's output; 0 if it has several outputs or their shape is unknown."""
    shapes = shapes_of_outputs(node)
    return math.prod(shapes[0]) if len(shapes) == 1 else 0


def _reduces_batch(node: Any) -> bool:
    """Return whether a mean with one element runs over a first dimension, not over a scalar or a list of scalars."""
    shape = tuple(saved(node, "self_sym_sizes", ()))
    if not shape or _scalars_beneath(node) is not None:
        return False
    kept = shapes_of_outputs(node)[0]
    # `[1, features]` reduced over features is the mean of one example, not of a batch.
    return len(kept) == 0 or shape[0] > 1


def _scalars_beneath(node: Any) -> list[Any] | None:
    """Return the nodes of the scalars that were stacked into a node's input; None if it was not a list of scalars."""
    below = [function for function, _ in node.next_functions]
    if len(below) != 1 or below[0] is None or below[0].name() not in _LISTS_OF_SCALARS:
        return None
    scalars = [function for function, _ in below[0].next_functions if function is not None]
    return scalars if all(_extent(scalar) == 1 for scalar in scalars) else None


def _inputs(node: Any, factors: tuple[float, ...]) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """Yield a node's inputs, each with the constant factors between it and the loss."""
    scalars = _scalars_beneath(node)
    if scalars is not None:
        # A mean of several losses: its divisor is their number, and says nothing about the replicas.
        for scalar in scalars:
            yield scalar, factors
        return
    name = node.name()
    others = [function for function, _ in node.next_functions]
    for index, function in enumerate(others):
        if function is None:
            continue
        factor = None
        if name.startswith("MulBackward") and all(other is None for other in others if other is not function):
            factor = _constant(node, "other" if index == 0 else "self")
        elif name.startswith("DivBackward") and others[1:] in ([], [None]):
            divisor = _constant(node, "other")
            factor = 1 / divisor if divisor else None
        yield function, factors if factor is None else (*factors, factor)


def _constant(node: Any, name: str) -> float | None:
    """Return a number that the graph saved, or None if it is not a number or an earlier pass freed it."""
    try:
        value = saved(node, name)
    except RuntimeError:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    return float(value) if isinstance(value, int | float) else None


def _function(node_name: str) -> str:
    """Return the function's name: `mse_loss` for `MseLossBackward0`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", node_name.split("Backward")[0]).lower()
