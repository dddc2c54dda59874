"""Synchronous training of a model that is divided over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from distnb.errors import OptionError
from distnb.options import StrategySpec
from distnb.sharded.sharding_options import MIN_SIZE, check_devices, checked_precision, checked_shard_by
from distnb.strategies.base import Strategy, kept_options
from distnb.topology import Device, distinct_names

if TYPE_CHECKING:
    from distnb.runtime.replica import Spmd
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["ShardedStrategy"]


class ShardedStrategy(Strategy):
    """A strategy that divides parameters, gradients and optimizer state over the replicas, by torch's FSDP2.

    Programs and results are the same as under MirroredStrategy. A model that is made in the scope is sharded when the
    scope ends, or earlier if an optimizer is created for it or `run` is called: each of its parameters becomes a
    `torch.distributed.tensor.DTensor`, of which this replica holds a part. Before a *unit*, such as a block of a
    transformer, computes, its parameters are gathered; afterwards they are freed. While a model is made, large
    parameters have no memory, so it may be larger than the memory of one device.

    Args:
        devices: One device per replica; None for all devices of the cluster (or of the script's processes).
        replicas_per_group: The number of replicas over which a model is divided (hybrid sharding). Each group of so
            many neighbouring replicas holds a whole model. None for all replicas.
        shard_by: The choice of units. "block": the repeated blocks of the model (the modules of a ModuleList, the
            layers of a transformer). None: these, or the model's largest parts if there are none. Or a function of a
            module's name and the module that returns True for each unit. The parameters outside all units are
            gathered with the model itself.
        min_size: The bytes of parameters that a module needs to be a unit of its own, unless a function chose it.
        offload: Whether shards of parameters, gradients and optimizer state are in the host's memory.
        mixed_precision: "bfloat16" or "float16": the dtype of computation, while gradients are summed and shards are
            updated in float32. Or a `torch.distributed.fsdp.MixedPrecisionPolicy`.
        gradient_reduction: "sum", as tf.distribute does, or "mean", weighted by the sizes of the replicas' slices.
        check_mean_loss: Whether, with "sum", a loss that is a mean over only the replica's slice is an error.

    Raises:
        OptionError: An argument is malformed or cannot be honoured.

    Example:
        >>> import distnb
        >>> strategy = distnb.ShardedStrategy()  # doctest: +SKIP
    """

    kind = "sharded"
    about = "on every engine: parameters, gradients and optimizer state are divided over the replicas"
    word_options = ("-n", "--devices", "--gradients")
    refusal = "a device has one replica there"

    def __new__(
        cls,
        devices: Sequence[str | Device] | str | None = None,
        replicas_per_group: int | None = None,
        shard_by: str | Callable[[str, Any], bool] | None = None,
        min_size: int = MIN_SIZE,
        offload: bool = False,
        mixed_precision: Any = None,
        gradient_reduction: str = "sum",
        *,
        check_mean_loss: bool = True,
    ) -> Self:
        names = distinct_names(devices, "devices")
        options = kept_options(
            gradient_reduction,
            check_mean_loss,
            replicas_per_group=_checked_number("replicas_per_group", replicas_per_group, 2),
            shard_by=checked_shard_by(shard_by),
            min_size=None if min_size == MIN_SIZE else _checked_number("min_size", min_size, 0),
            offload=_checked_flag("offload", offload),
            mixed_precision=checked_precision(mixed_precision),
        )
        spec = StrategySpec(kind=cls.kind, devices=names, num_replicas=0, options=options)
        cls.check_here(spec, cls.__name__)
        strategy = cls._of(spec)
        strategy._meet()
        return strategy

    @classmethod
    def check_here(cls, spec: StrategySpec, who: str) -> None:
        """Raise OptionError for devices that cannot honour the options."""
        check_devices(spec, spec.devices)

    def check_honoured(self, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
        """Raise OptionError for devices that cannot honour the options."""
        check_devices(self.spec, devices)

    def cell(self) -> AbstractContextManager[None]:
        """Return a context in which a cell gets a notice if it trains what the strategy has not sharded."""
        from distnb.sharded.unsharded_steps import noticing

        return noticing()

    def make_runtime(self, process: SpmdProcess) -> Spmd:
        """Make the runtime for one replica, whose modules are sharded."""
        from distnb.sharded.sharded_replica import ShardedSpmd

        return ShardedSpmd(process, self)


def _checked_number(name: str, value: Any, least: int) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise OptionError(f"{name}={value!r}: give a whole number from {least}.")
    return value


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r}: write True or False.")
    return value
