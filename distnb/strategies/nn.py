"""Scaling of losses, so that gradients summed over the replicas are those of the global batch."""

from __future__ import annotations

from typing import Any

import torch

from distnb.errors import ContextError, OptionError
from distnb.runtime.reduction.reducing import broadcastable_weight
from distnb.runtime.replica_context import ReplicaContext
from distnb.runtime.scopes.divided_objects import is_divided
from distnb.strategies.context import get_replica_context, get_strategy
from distnb.values import DistributedValues
from distnb.variables.variable import Variable

__all__ = ["compute_average_loss", "embedding_lookup", "scale_regularization_loss"]


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> torch.Tensor:
    """Return the replica's part of the mean loss over the global batch: its sum, divided by the global batch size.

    Args:
        per_example_loss: `[batch, ...]`, the losses of this replica's examples; empty for an empty slice.
        sample_weight: Factors of the losses: a number, or a tensor that broadcasts from the left to the losses' shape.
            A last axis of 1 that the losses do not have is dropped. The divisor does not change.
        global_batch_size: The number of examples in the global batch. None takes it from the distributed batch in the
            arguments of `strategy.run`. Without such a batch the replicas add up their sizes.

    Returns:
        A scalar. Summed over the replicas it is the mean over the global batch.

    Raises:
        OptionError: The loss is a scalar, the batch size is no whole number above 0, there is not one loss per example,
            or the weights do not fit the losses.
        ContextError: Called in cross-replica context without a `global_batch_size`, or with a distributed value.

    Example:
        >>> compute_average_loss(torch.tensor([1.0, 2.0, 3.0, 6.0]))
        tensor(3.)
    """
    losses = _tensor("compute_average_loss", per_example_loss)
    if losses.ndim == 0:
        raise OptionError(
            "compute_average_loss got a scalar and needs the loss of each example. Compute it with reduction='none'; "
            "a loss that is a mean over the replica's slice cannot be scaled rightly, because slices may differ in "
            "size."
        )
    if not losses.is_floating_point():
        losses = losses.to(torch.get_default_dtype())
    count = _checked_size(global_batch_size) if global_batch_size is not None else _global_count(losses)
    if sample_weight is not None:
        losses = losses * broadcastable_weight(sample_weight, losses, "compute_average_loss", "losses")
    return losses.sum() / count


def scale_regularization_loss(regularization_loss: Any) -> torch.Tensor:
    """Return the replica's share of a loss that is equal on every replica, such as weight decay.

    Args:
        regularization_loss: A tensor of any shape, which is summed up, or a number.

    Returns:
        The sum, divided by the number of replicas.

    Raises:
        ContextError: Called in cross-replica context, or with a distributed value.

    Example:
        >>> scale_regularization_loss(torch.tensor([1.0, 3.0]))
        tensor(4.)
    """
    replica = _replica("scale_regularization_loss")
    loss = _tensor("scale_regularization_loss", regularization_loss)
    if not loss.is_floating_point():
        loss = loss.to(torch.get_default_dtype())
    return loss.sum() / replica.num_replicas_in_sync


def embedding_lookup(params: Any, ids: Any, max_norm: float | None = None) -> torch.Tensor:
    """Look up rows of a table.

    From a variable on parameter servers each requested row is read once, from all servers at the same time.

    Args:
        params: `[rows, ...]`: a tensor, a variable, a `ShardedVariable`, or the list of its shards.
        ids: Numbers of rows, of any shape.
        max_norm: The largest Euclidean norm of a returned row. Longer rows are scaled. None to scale none.

    Returns:
        `[*ids.shape, ...]`, with gradients if the table has gradients.

    Raises:
        IndexError: There is no such row.

    Example:
        >>> embedding_lookup(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [1, 1, 0])[:, 0]
        tensor([3., 3., 1.])
    """
    places, table = torch.as_tensor(ids).long(), _table(params)
    rows = table._rows_at(places) if isinstance(table, Variable) else torch.nn.functional.embedding(places, table)
    if max_norm is None:
        return rows
    norms: torch.Tensor = torch.linalg.vector_norm(rows.flatten(torch.as_tensor(ids).dim()), dim=-1)
    scale = (max_norm / norms.clamp_min(max_norm)).reshape(*norms.shape, *[1] * (rows.dim() - norms.dim()))
    return rows * scale


def _table(params: Any) -> Any:
    """Return the variable to which a list of shards belongs, or any other argument itself."""
    if not isinstance(params, (list, tuple)) or not all(isinstance(each, Variable) for each in params):
        return params
    tables = {id(each._table): each._table for each in params}
    return next(iter(tables.values())) if len(tables) == 1 else params


def _tensor(function: str, loss: Any) -> torch.Tensor:
    if isinstance(loss, DistributedValues):
        raise ContextError(
            f"distnb.nn.{function} got a {loss._word} with components of {loss.num_replicas} replica(s), but it "
            "scales the loss of one replica. Call it in the function that strategy.run calls: "
            "strategy.run(step, args=(batch,))."
        )
    made: Any = torch.as_tensor(loss)
    whole: torch.Tensor = made.full_tensor() if is_divided(made) else made  # a penalty of sharded parameters
    return whole


def _replica(function: str, cure: str = "") -> ReplicaContext:
    replica = get_replica_context()
    if replica is None:
        raise ContextError(
            f"distnb.nn.{function} was called in the cross-replica context of {get_strategy()!r}, where no replica's "
            f"loss is. Call it in the function that strategy.run calls{cure}."
        )
    return replica


def _checked_size(size: Any) -> int:
    if isinstance(size, torch.Tensor) and size.ndim == 0:
        size = size.item()
    if isinstance(size, bool) or not hasattr(size, "__index__") or int(size) <= 0:
        raise OptionError(
            f"global_batch_size={size!r}: give the number of examples in the global batch, a whole number above 0."
        )
    return int(size)


def _global_count(losses: torch.Tensor) -> int:
    replica = _replica("compute_average_loss", ", or give global_batch_size")
    local = int(losses.shape[0])
    if replica.global_batch_size is None:
        # At least 1: the loss of an empty batch is 0, not NaN.
        return max(int(replica.all_reduce("sum", local)), 1)
    if replica.slice_size is not None and replica.slice_size != local:
        raise OptionError(
            f"compute_average_loss got {local} losses, and this replica's slice of the batch has {replica.slice_size} "
            "examples, so the divisor is not the batch's size. Say what to divide by: global_batch_size=."
        )
    return max(replica.global_batch_size, 1)
