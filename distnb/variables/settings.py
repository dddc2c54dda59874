"""The checked options of a variable, and the conversion of values that are assigned to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distnb.errors import DistributedValueError, OptionError, StructureError
from distnb.options import VariableAggregation, VariableSynchronization
from distnb.values.distributed import DistributedValues, Mirrored

__all__ = ["Settings", "initial_tensor", "parse_settings", "value_for"]


@dataclass(frozen=True)
class Settings:
    """Checked options of a variable; see `distnb.Variable`."""

    trainable: bool
    name: str | None
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @property
    def on_read(self) -> bool:
        """True if the replicas' components are independent until the variable is read."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def summary(self) -> str:
        """The options that must be equal on every replica, in words."""
        when, learns = "ON_READ" if self.on_read else "ON_WRITE", "" if self.trainable else ", not trainable"
        return f"Variable {f'{self.name} ' if self.name else ''}({when}, {self.aggregation.name}{learns})"

    @property
    def label(self) -> str:
        """The name of the variable in errors."""
        return f"variable {self.name!r}" if self.name else "a variable"


def parse_settings(trainable: Any, name: Any, dtype: torch.dtype, synchronization: Any, aggregation: Any) -> Settings:
    """Check the options of a variable of a dtype. Raise OptionError if they are incompatible."""
    how, when = VariableAggregation.parse(aggregation), VariableSynchronization.parse(synchronization)
    if when is VariableSynchronization.NONE:
        raise OptionError(
            "synchronization='NONE' would be a single copy that is not kept in sync. Use a plain tensor for that; "
            "for a variable choose 'AUTO', 'ON_WRITE' or 'ON_READ'."
        )
    if trainable not in (None, True, False):
        raise OptionError(f"trainable={trainable!r}: give True, False, or None to decide by the dtype.")
    if name is not None and not isinstance(name, str):
        raise OptionError(f"name={name!r}: give a string, or None.")
    floating = dtype.is_floating_point or dtype.is_complex
    if trainable and when is VariableSynchronization.ON_READ:
        raise OptionError(
            "trainable=True with synchronization='ON_READ': replicas of a trainable variable must be equal at every "
            "step. Leave the synchronization out, or set trainable=False."
        )
    if trainable and not floating:
        raise OptionError(f"trainable=True for {dtype}: only floating-point numbers have gradients.")
    if how is VariableAggregation.MEAN and not floating:
        raise OptionError(
            f"aggregation='MEAN' for {dtype}: a mean is not a whole number. Set dtype=torch.float32, or "
            "choose another aggregation."
        )
    if how is VariableAggregation.SUM and dtype is torch.bool:
        raise OptionError("aggregation='SUM' for booleans is not defined. Set dtype=torch.int64 to count.")
    if trainable is None:
        trainable = floating and when is not VariableSynchronization.ON_READ
    return Settings(trainable=bool(trainable), name=name, synchronization=when, aggregation=how)


def initial_tensor(value: Any, dtype: Any, device: torch.device | None) -> torch.Tensor:
    """Return a new tensor with the initial value of a variable, which may be a function that returns the value."""
    if callable(value) and not isinstance(value, (torch.Tensor, DistributedValues)):
        value = value()
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: give a torch.dtype, such as torch.float32.")
    tensor = _as_tensor(value, "The initial value of a variable").detach().to(device=device, dtype=dtype)
    return tensor.clone(memory_format=torch.contiguous_format)


def value_for(variable: torch.Tensor, label: str, method: str, value: Any) -> torch.Tensor:
    """Convert a value to the shape, dtype and device of a variable, so that it can be assigned.

    `label` is the name of the variable in errors, and `method` the user's call.
    """
    tensor = _as_tensor(value, f"{method} of {label}").detach()
    if not torch.can_cast(tensor.dtype, variable.dtype):
        raise DistributedValueError(
            f"{method} of {label} got {tensor.dtype}, and the variable is {variable.dtype}: "
            "the conversion would lose information. Convert the value first, or make the variable with another dtype."
        )
    try:
        return tensor.to(variable).expand(variable.shape)
    except RuntimeError:
        raise StructureError(
            f"{method} of {label} got a value of shape {list(tensor.shape)}, which does not fit the variable's, "
            f"{list(variable.shape)}. Give a value of that shape, or one that can be broadcast to it."
        ) from None


def _as_tensor(value: Any, what: str) -> torch.Tensor:
    if isinstance(value, Mirrored) and value.replica_ids:
        value = value.component(value.replica_ids[0])
    if isinstance(value, DistributedValues):
        raise DistributedValueError(
            f"{what} got a {type(value).__name__}, which has another component on each replica. Combine it first with "
            "strategy.reduce(op, value, axis=None), or assign in the function that strategy.run calls, with the "
            "value in args: there the variable's aggregation combines the components."
        )
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DistributedValueError(
            f"{what} must be a number, a list, an array or a tensor, and got a {type(value).__name__}: {error}"
        ) from None
