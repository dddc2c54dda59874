"""The optimizers of a parameter server: any optimizer of `torch.optim`, for the shards that the server holds."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distnb.compat import torch_internals
from distnb.errors import OptionError, StaleHandleError, StructureError
from distnb.servers.server_messages import Gradient, RowsGradient, Shard
from distnb.servers.variables.copies import same_value

__all__ = ["ServerOptimizer"]


class ServerOptimizer:
    """An optimizer for some shards.

    Args:
        factory: See `MakeOptimizer`.
        groups: The shards of each parameter group.
        parameters: The parameter of each shard.

    Attributes:
        steps: The number of steps taken.

    Raises:
        OptionError: The factory does not make a torch optimizer with these groups, or the optimizer's step computes
            gradients itself, as LBFGS does.
    """

    def __init__(
        self,
        factory: bytes,
        groups: Sequence[Sequence[Shard]],
        parameters: Mapping[Shard, torch.nn.Parameter],
    ) -> None:
        self.steps = 0
        self._parameters = {shard: parameters[shard] for group in groups for shard in group}
        made = pickle.loads(factory)([[parameters[shard] for shard in group] for group in groups])
        self._optimizer: torch.optim.Optimizer = made
        self._name = type(made).__name__
        if len(getattr(made, "param_groups", ())) != len(groups):
            raise OptionError(
                f"A parameter server got a function that makes a {self._name} for {len(groups)} groups of parameters. "
                "It must return an optimizer of torch.optim with these groups."
            )
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptionError(
                f"{self._name} computes the loss and its gradients several times within a step, which a parameter "
                "server cannot: it only gets gradients. Use another optimizer, or another strategy."
            )

    def __bool__(self) -> bool:
        """Return whether the optimizer has any shards."""
        return bool(self._parameters)

    def prepare(
        self, gradients: Mapping[Shard, Gradient], options: Sequence[Mapping[str, Any]]
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Check a step's arguments and return each parameter with its gradient, for `step`. Change nothing.

        Raises:
            StaleHandleError: The optimizer does not have a shard that has a gradient.
            StructureError: A gradient does not fit its shard, or the number of options differs from that of the groups.
        """
        groups = self._optimizer.param_groups
        if len(options) != len(groups):
            raise StructureError(
                f"{self._name} has {len(groups)} groups of parameters, and got options of {len(options)}."
            )
        own = {shard: self._parameter(shard) for shard in gradients}
        return [(own[shard], _fitting(shard, own[shard], gradient)) for shard, gradient in gradients.items()]

    def step(
        self, ready: Sequence[tuple[torch.nn.Parameter, torch.Tensor]], options: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take one step.

        An exception of the optimizer propagates. Some parameters may then be updated and others not.

        Raises:
            OptionError: The optimizer has changed its own options. The next step would undo that.

        Args:
            ready: The parameters with their gradients, as `prepare` returns them.
            options: The options of each parameter group, such as the learning rate.
        """
        for group, wanted in zip(self._optimizer.param_groups, options, strict=True):
            for name, value in wanted.items():
                if name not in group or not same_value(group[name], value):
                    group[name] = value
        try:
            for parameter, gradient in ready:
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            for parameter, _ in ready:
                parameter.grad = None
        self.steps += 1
        for group, wanted in zip(self._optimizer.param_groups, options, strict=True):
            for name, value in wanted.items():
                if not same_value(group[name], value):
                    raise OptionError(
                        f"{self._name} changed its option {name!r} during a step, from {value} to {group[name]}. On "
                        "parameter servers options are the coordinator's, which are sent with each step. Such an "
                        "optimizer must keep its numbers in `self.state[parameter]`."
                    )

    def _parameter(self, shard: Shard) -> torch.nn.Parameter:
        if shard not in self._parameters:
            raise StaleHandleError(
                f"{self._name} on this parameter server has no parameter {shard}: it was made for other "
                "parameters, or this one was created again. Create the optimizer after the parameters."
            )
        return self._parameters[shard]

    def state(self) -> dict[Shard, dict[str, Any]]:
        """Return the state of each shard that has any: the optimizer's own tensors, not copies."""
        known = self._optimizer.state
        return {shard: dict(known[parameter]) for shard, parameter in self._parameters.items() if parameter in known}

    def load(self, state: Mapping[Shard, Mapping[str, Any]], steps: int) -> None:
        """Restore copies of the states of some shards. A shard that was never in a step has an empty state."""
        own = {shard: self._parameter(shard) for shard in state}
        for shard, values in state.items():
            self._optimizer.state.pop(own[shard], None)
            if values:
                self._optimizer.state[own[shard]] = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()
                }
        self.steps = steps

    def forget(self, shard: Shard) -> None:
        """Remove a shard that was dropped."""
        parameter = self._parameters.pop(shard, None)
        if parameter is not None:
            self._optimizer.state.pop(parameter, None)
            for group in self._optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is not parameter]


def _fitting(shard: Shard, parameter: torch.nn.Parameter, gradient: Gradient) -> torch.Tensor:
    """Return a gradient in the form that the optimizer expects.

    Raises:
        StructureError: The gradient does not fit the shard's parameter.
    """
    values = gradient.values if isinstance(gradient, RowsGradient) else gradient
    wanted = parameter.shape
    if isinstance(gradient, RowsGradient):
        rows = gradient.rows
        wanted = torch.Size((*rows.shape, *parameter.shape[1:]))
        if rows.ndim != 1 or rows.dtype != torch.int64 or not _within(rows, len(parameter)):
            raise StructureError(f"The gradient of shard {shard} names rows outside its {len(parameter)}.")
    if values.shape != wanted or values.dtype != parameter.dtype:
        raise StructureError(
            f"The gradient of shard {shard} is {values.dtype} of shape {list(values.shape)}, where its parameter "
            f"takes {parameter.dtype} of shape {list(wanted)}."
        )
    if not isinstance(gradient, RowsGradient):
        return gradient
    if gradient.sparse:
        # Gradients of the same row are summed before the step, as in a dense gradient. Workers send each row once and
        # in order, so the tensor is usually coalesced already.
        summed = bool((rows[1:] > rows[:-1]).all())
        found = torch_internals.sparse_tensor(rows[None], values, parameter.shape, is_coalesced=summed)
        return found.coalesce()
    return torch.zeros_like(parameter).index_add_(0, rows, values)


def _within(rows: torch.Tensor, size: int) -> bool:
    return not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < size)
