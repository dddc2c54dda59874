"""The options of ShardedStrategy in the form that travels in its spec. Loads no torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from distnb.errors import OptionError
from distnb.options import StrategySpec
from distnb.variables.elementwise import not_known_elementwise

__all__ = [
    "MIN_SIZE",
    "Precision",
    "UnitPredicate",
    "check_devices",
    "checked_precision",
    "checked_shard_by",
    "not_elementwise",
]

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


def checked_shard_by(given: Any) -> str | UnitPredicate | None:
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


def checked_precision(given: Any) -> Precision | None:
    """Return the option `mixed_precision`: from a dtype, its name, or torch's MixedPrecisionPolicy.

    Raises:
        OptionError: It is malformed.
    """
    if given is None:
        return None
    if hasattr(given, "param_dtype") and hasattr(given, "reduce_dtype"):
        return Precision(
            param_dtype=_name(given.param_dtype),
            reduce_dtype=_name(given.reduce_dtype),
            output_dtype=_name(getattr(given, "output_dtype", None)),
            cast_forward_inputs=bool(getattr(given, "cast_forward_inputs", True)),
        )
    name = _DTYPES.get(_name(given) or "")
    if name is None:
        raise OptionError(
            f'mixed_precision={given!r}: write "bfloat16" or "float16" (gradients are then summed in float32), or give '
            "a torch.distributed.fsdp.MixedPrecisionPolicy."
        )
    return Precision(param_dtype=name, reduce_dtype="float32")


def _name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def check_devices(spec: StrategySpec, devices: Sequence[str]) -> None:
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
