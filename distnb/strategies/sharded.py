"""Synchronous training of a model that is divided over the replicas.

The strategy and its options are here, and load no torch. The feature `distnb/sharded/` divides models.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from distnb import features
from distnb.errors import OptionError
from distnb.options import StrategySpec
from distnb.strategies.base import Strategy, kept_options
from distnb.topology import Device, distinct_names
from distnb.variables.elementwise import not_known_elementwise

if TYPE_CHECKING:
    from distnb.runtime.replica import Spmd
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["MIN_SIZE", "Precision", "ShardedStrategy", "UnitPredicate", "not_elementwise"]

MIN_SIZE = 1_000_000
"""The default of the option `min_size`, in bytes."""

_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}


@dataclass(frozen=True)
class Precision:
    """The dtypes of computation, as names of torch; None keeps the parameters' own.

    Attributes:
        param_dtype: The dtype of parameters in forward and backward passes.
        reduce_dtype: The dtype in which gradients are summed over the replicas.
        output_dtype: The dtype to which a unit's floating-point outputs are cast.
        cast_forward_inputs: Whether a unit's floating-point inputs are cast to `param_dtype`.
    """

    param_dtype: str | None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class UnitPredicate:
    """A user's function that selects units. Two are equal if their pickles are.

    Attributes:
        name: The function's name.
        pickled: The function, by value.
    """

    name: str = field(compare=False)
    pickled: bytes = field(repr=False)

    def load(self) -> Callable[[str, Any], bool]:
        """Return the function."""
        function: Callable[[str, Any], bool] = pickle.loads(self.pickled)
        return function


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
            shard_by=_checked_shard_by(shard_by),
            min_size=None if min_size == MIN_SIZE else _checked_number("min_size", min_size, 0),
            offload=_checked_flag("offload", offload),
            mixed_precision=_checked_precision(mixed_precision),
        )
        spec = StrategySpec(kind=cls.kind, devices=names, num_replicas=0, options=options)
        cls.check_here(spec, cls.__name__)
        strategy = cls._of(spec)
        strategy._meet()
        return strategy

    @classmethod
    def check_here(cls, spec: StrategySpec, who: str) -> None:
        """Raise OptionError for devices that cannot honour the options."""
        features.check("sharded models", "runtime")
        _check_devices(spec, spec.devices)

    def check_honoured(self, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
        """Raise OptionError for devices that cannot honour the options."""
        _check_devices(self.spec, devices)

    def cell(self) -> AbstractContextManager[None]:
        """Return a context in which a cell gets a notice if it trains what the strategy has not sharded."""
        noticing: Callable[[], AbstractContextManager[None]] = features.require("sharded models", "notice")
        return noticing()

    def make_runtime(self, process: SpmdProcess) -> Spmd:
        """Make the runtime for one replica, whose modules are sharded."""
        made: Spmd = features.require("sharded models", "runtime")(process, self)
        return made


def _checked_number(name: str, value: Any, least: int) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise OptionError(f"{name}={value!r}: give a whole number from {least}.")
    return value


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r}: write True or False.")
    return value


def _checked_shard_by(given: Any) -> str | UnitPredicate | None:
    """Return the option `shard_by`. Raise OptionError if it is malformed."""
    if given is None or given == "block":
        return given  # type: ignore[no-any-return]
    if not callable(given):
        raise OptionError(
            f'shard_by={given!r}: write "block", or give a function of a module\'s name and the module that returns '
            "True for each module whose parameters are gathered together."
        )
    try:
        pickled = cloudpickle.dumps(given)
    except Exception as error:
        raise OptionError(f"shard_by={given!r} cannot be sent to the replicas: {error}.") from error
    return UnitPredicate(getattr(given, "__name__", type(given).__name__), pickled)


def _checked_precision(given: Any) -> Precision | None:
    """Return the option `mixed_precision`: from a dtype, its name, or torch's MixedPrecisionPolicy.

    Raises:
        OptionError: It is malformed.
    """
    if given is None:
        return None
    if hasattr(given, "param_dtype") and hasattr(given, "reduce_dtype"):
        return Precision(
            param_dtype=_name_of(given.param_dtype),
            reduce_dtype=_name_of(given.reduce_dtype),
            output_dtype=_name_of(getattr(given, "output_dtype", None)),
            cast_forward_inputs=bool(getattr(given, "cast_forward_inputs", True)),
        )
    name = _DTYPES.get(_name_of(given) or "")
    if name is None:
        raise OptionError(
            f'mixed_precision={given!r}: write "bfloat16" or "float16" (gradients are then summed in float32), or give '
            "a torch.distributed.fsdp.MixedPrecisionPolicy."
        )
    return Precision(param_dtype=name, reduce_dtype="float32")


def _name_of(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _check_devices(spec: StrategySpec, devices: Sequence[str]) -> None:
    """Raise OptionError if replicas on these devices cannot do what the options ask for."""
    per_group = spec.option("replicas_per_group")
    if per_group is not None and devices and len(devices) % per_group:
        raise OptionError(
            f"replicas_per_group={per_group}: {len(devices)} replicas cannot be divided into groups of {per_group}. "
            "Give a divisor of the number of replicas."
        )
    on_host = [device for device in devices if device.startswith("cpu")]
    if spec.option("offload") and on_host:
        raise OptionError(
            f"offload=True keeps shards in the host's memory, and the replica on {on_host[0]} has no other. Leave it "
            "out, or use GPUs."
        )


def not_elementwise(optimizer: object) -> OptionError:
    """Return the error for an optimizer that may need whole parameters, of which each replica has only a part."""
    return not_known_elementwise(type(optimizer), "the parameters of a ShardedStrategy", "use a MirroredStrategy")
