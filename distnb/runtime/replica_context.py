"""A replica's number, batch and collectives. Loads torch only when it communicates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distnb.errors import ContextError, OptionError
from distnb.options import CommunicationOptions, ReduceOp
from distnb.runtime import contexts
from distnb.values.distributed import PerReplica
from distnb.values.structure import map_structure, select

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation

__all__ = ["ReplicaContext"]


class ReplicaContext:
    """Given by `distnb.get_replica_context()` inside a function that `strategy.run` calls; not made directly.

    Attributes:
        strategy: Whose replica this is.
        replica_id_in_sync_group: From 0 to `num_replicas_in_sync - 1`.
        num_replicas_in_sync: How many there are.
        global_batch_size: Examples in the distributed batch that `run` was given; None when there was none, or several
            of different sizes.
        slice_size: Examples in this replica's slice of it.
    """

    def __init__(
        self,
        strategy: Any,
        replica_id: int = 0,
        num_replicas: int = 1,
        aggregation: Aggregation | None = None,
        batch_size: int | None = None,
        slice_size: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = replica_id
        self.num_replicas_in_sync = num_replicas
        self._aggregation = aggregation
        self.global_batch_size = batch_size
        self.slice_size = slice_size

    def __repr__(self) -> str:
        own, total = self.replica_id_in_sync_group, self.num_replicas_in_sync
        return f"<ReplicaContext: replica {own} of {total} of {self.strategy!r}>"

    @property
    def devices(self) -> tuple[str, ...]:
        """The device on which this replica computes, alone in a tuple."""
        device = self.strategy.worker_devices[self.replica_id_in_sync_group]
        return (device,)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Combine a value of every replica; each gets the result. Gradients flow through.

        Args:
            reduce_op: "sum" or "mean", in any case, or a `distnb.ReduceOp`.
            value: A tensor, an array, a Python number, or a nested structure of them; equal shapes on all replicas. Of
                sparse (COO) tensors only the entries are sent; no gradient flows through them.
            options: How to communicate in this call and its gradients', instead of the strategy's options.

        Returns:
            The same structure of results. MEAN of integers is float64.

        Raises:
            OptionError: The op is unknown; the options cannot be honoured.
            DistributedValueError: The value is boolean, or no number at all.
            ContextError: Called outside the function of `run` that this context belongs to.
        """
        op, aggregation = ReduceOp.parse(reduce_op), self._communicating(options)
        if aggregation is None:
            return value
        from distnb.runtime.reduction.reducing import all_reduce_tree

        return all_reduce_tree(aggregation, op, value)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the tensors of every replica; each gets the result. Gradients flow through.

        Args:
            value: A tensor or array, or a nested structure of them; sizes may differ along `axis` only.
            axis: Along which; negative ones count from the end.
            options: As in `all_reduce`; without `bytes_per_pack`, since each tensor is a message of its own.

        Raises:
            OptionError: The axis is out of range, or a value is a scalar; the options cannot be honoured.
            StructureError: Shapes differ along another axis, or dtypes do.
        """
        if isinstance(options, CommunicationOptions) and options.bytes_per_pack:
            raise OptionError(
                f"bytes_per_pack={options.bytes_per_pack} cannot be honoured by all_gather: each tensor is a message "
                "of its own. Leave it out."
            )
        aggregation = self._communicating(options)
        from distnb.runtime.reduction.gathering import all_gather_tree

        return all_gather_tree(aggregation, value, axis)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Leave the replica for one call: all replicas meet, and the function runs once, in cross-replica context.

        Args:
            merge_fn: Called as `merge_fn(strategy, *args, **kwargs)`.
            args: This replica's arguments; the function gets a PerReplica for each leaf.
            kwargs: Likewise.

        Returns:
            The function's result, of which each replica gets its component.
        """
        self._check()
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise ContextError(f"merge_call needs args as a tuple or list and got {args!r}. Write args=(value,).")
        own, total = self.replica_id_in_sync_group, self.num_replicas_in_sync

        with contexts.enter_cross_replica(self.strategy):
            if total == 1:
                return merge_fn(self.strategy, *args, **(kwargs or {}))
            from distnb.runtime.randomness import streams

            assert self._aggregation is not None
            merged, named = map_structure(
                lambda leaf: PerReplica.own(own, leaf, total), (tuple(args), dict(kwargs or {}))
            )
            self._aggregation.group.note("merge_call", ())  # all replicas come here, or it is an error
            with streams.shared():
                result = merge_fn(self.strategy, *merged, **named)
        return select(result, own, total)

    def _communicating(self, options: object) -> Aggregation | None:
        """Return the aggregation of this call's tensors; None where there is one replica only."""
        if options is not None and not isinstance(options, CommunicationOptions):
            raise OptionError(f"options={options!r}: give a distnb.CommunicationOptions, or leave it out.")
        self._check()
        if self._aggregation is None or self.num_replicas_in_sync == 1:
            return None
        return self._aggregation if options is None else self._aggregation.with_options(options)

    def _check(self) -> None:
        if self._aggregation is None:
            return  # the default context is in force wherever no other is
        innermost = contexts.innermost()
        if innermost is None or innermost[1] is not self:
            raise ContextError(
                "A ReplicaContext was used outside the function of strategy.run that it belongs to. Ask "
                "distnb.get_replica_context() anew in the function; outside it, use strategy.reduce or strategy.gather."
            )
