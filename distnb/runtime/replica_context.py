"""The context of a replica: its number, its batch and its collectives. Loads torch only when it communicates."""

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
    """The context of a replica in a function that `strategy.run` calls.

    Get it with `distnb.get_replica_context()`; do not construct it yourself.

    Attributes:
        strategy: The strategy to which the replica belongs.
        replica_id_in_sync_group: The number of the replica, from 0 to `num_replicas_in_sync - 1`.
        num_replicas_in_sync: The number of replicas.
        global_batch_size: The number of examples in the distributed batch that `run` was given. None: there was no such
            batch, or there were several of different sizes.
        slice_size: The number of examples in this replica's slice of the batch.
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
        """The device on which this replica computes, as a tuple of one."""
        device = self.strategy.worker_devices[self.replica_id_in_sync_group]
        return (device,)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Combine the values of all replicas. Each replica gets the result. Gradients flow through.

        Args:
            reduce_op: "sum" or "mean", in upper or lower case, or a `distnb.ReduceOp`.
            value: A tensor, an array, a Python number, or a nested structure of these. Shapes must be equal on all
                replicas. Of sparse (COO) tensors only the entries are sent, and no gradient flows through them.
            options: The communication options for this call and its gradients, instead of the strategy's.

        Returns:
            A structure of results like `value`. The mean of integers is float64.

        Raises:
            OptionError: The op is unknown, or the options cannot be honoured.
            DistributedValueError: The value is boolean or not numeric.
            ContextError: The call is outside the function of `run` to which this context belongs.
        """
        op, aggregation = ReduceOp.parse(reduce_op), self._communicating(options)
        if aggregation is None:
            return value
        from distnb.runtime.reduction.reducing import all_reduce_tree

        return all_reduce_tree(aggregation, op, value)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the tensors of all replicas. Each replica gets the result. Gradients flow through.

        Args:
            value: A tensor, an array, or a nested structure of these. Sizes may differ only along `axis`.
            axis: The axis of the concatenation. A negative axis counts from the end.
            options: As in `all_reduce`, but without `bytes_per_pack`, because each tensor is a separate message.

        Raises:
            OptionError: The axis is out of range, a value is a scalar, or the options cannot be honoured.
            StructureError: Dtypes differ, or shapes differ along another axis.
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
        """Call a function once for all replicas, in cross-replica context. All replicas must make this call.

        Args:
            merge_fn: The function, called as `merge_fn(strategy, *args, **kwargs)`.
            args: This replica's positional arguments. The function receives a PerReplica for each leaf.
            kwargs: This replica's named arguments, which are handled likewise.

        Returns:
            This replica's component of the function's result.
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
            self._aggregation.group.note("merge_call", ())  # raises if a replica makes another call instead
            with streams.shared():
                result = merge_fn(self.strategy, *merged, **named)
        return select(result, own, total)

    def _communicating(self, options: object) -> Aggregation | None:
        """Return the aggregation for this call's tensors, or None if there is only one replica."""
        if options is not None and not isinstance(options, CommunicationOptions):
            raise OptionError(f"options={options!r}: give a distnb.CommunicationOptions, or leave it out.")
        self._check()
        if self._aggregation is None or self.num_replicas_in_sync == 1:
            return None
        return self._aggregation if options is None else self._aggregation.with_options(options)

    def _check(self) -> None:
        if self._aggregation is None:
            return  # the context of a single replica, such as the default one, can be used anywhere
        innermost = contexts.innermost()
        if innermost is None or innermost[1] is not self:
            raise ContextError(
                "A ReplicaContext was used outside its function of strategy.run. Call "
                "distnb.get_replica_context() in each function; outside, use strategy.reduce or strategy.gather."
            )
