"""Optimizers of a parameter server: any of `torch.optim`, on the shards that the server has."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distnb.errors import OptionError, StaleHandleError, StructureError
from distnb.runtime.servers.server_messages import Gradient, RowsGradient, Shard

__all__ = ["ServerOptimizer"]


class ServerOptimizer:
    """An optimizer on some shards.

    Args:
        factory: See `MakeOptimizer`.
        groups: Its shards by group.
        parameters: Every shard's parameter.

    Attributes:
        steps: How many there were.

    Raises:
        OptionError: The factory makes something else than a torch optimizer of these groups, or one whose step
            computes gradients itself.
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
                "It has to return an optimizer of torch.optim with these groups."
            )
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptionError(
                f"{self._name} computes the loss and its gradients several times within a step, which a parameter "
                "server cannot: it only gets gradients. Use another optimizer, or another strategy."
            )

    def __bool__(self) -> bool:
        """Return whether it has a shard."""
        return bool(self._parameters)

    def prepare(
        self, gradients: Mapping[Shard, Gradient], options: Sequence[Mapping[str, Any]]
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return the arguments of `step`, parameters with their gradients. Nothing changes.

        Raises:
            StaleHandleError: The optimizer has no such shard.
            StructureError: A gradient does not fit its shard, or there are not as many options as groups.
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
        """Step once, on parameters that have gradients, with these options of the groups.

        What the optimizer raises passes through: some parameters may have got their update then, and others not.
        """
        for group, wanted in zip(self._optimizer.param_groups, options, strict=True):
            for name, value in wanted.items():
                if name not in group or not _same(group[name], value):
                    group[name] = value
        try:
            for parameter, gradient in ready:
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            for parameter, _ in ready:
                parameter.grad = None
        self.steps += 1

    def _parameter(self, shard: Shard) -> torch.nn.Parameter:
        if shard not in self._parameters:
            raise StaleHandleError(
                f"{self._name} on this parameter server has no parameter {shard}: it was made for others, or that one "
                "was made anew. Make the optimizer after the parameters."
            )
        return self._parameters[shard]

    def state(self) -> dict[Shard, dict[str, Any]]:
        """Return the state of each shard that has some: the optimizer's own tensors, not copies."""
        known = self._optimizer.state
        return {shard: dict(known[parameter]) for shard, parameter in self._parameters.items() if parameter in known}

    def load(self, state: Mapping[Shard, Mapping[str, Any]], steps: int) -> None:
        """Give some shards a state, copied. An empty one is that of a shard that never was in a step."""
        own = {shard: self._parameter(shard) for shard in state}
        for shard, values in state.items():
            self._optimizer.state.pop(own[shard], None)
            if values:
                self._optimizer.state[own[shard]] = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()
                }
        self.steps = steps

    def forget(self, shard: Shard) -> None:
        """Forget a shard that is gone."""
        parameter = self._parameters.pop(shard, None)
        if parameter is not None:
            self._optimizer.state.pop(parameter, None)
            for group in self._optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is not parameter]


def _fitting(shard: Shard, parameter: torch.nn.Parameter, gradient: Gradient) -> torch.Tensor:
    """Return a gradient in the form that the optimizer takes."""
    values = gradient.values if isinstance(gradient, RowsGradient) else gradient
    wanted = parameter.shape
    if isinstance(gradient, RowsGradient):
        rows = gradient.rows
        wanted = torch.Size((*rows.shape, *parameter.shape[1:]))
        if rows.ndim != 1 or rows.dtype != torch.int64 or not _within(rows, len(parameter)):
            raise StructureError(f"The gradient of shard {shard} names rows that are not in its {len(parameter)}.")
    if values.shape != wanted or values.dtype != parameter.dtype:
        raise StructureError(
            f"The gradient of shard {shard} is {values.dtype} of shape {list(values.shape)}, where its parameter "
            f"takes {parameter.dtype} of shape {list(wanted)}."
        )
    if not isinstance(gradient, RowsGradient):
        return gradient
    if gradient.sparse:
        # What one row gets is summed first: dense gradients are, too. Workers send each row once, in order.
        summed = bool((rows[1:] > rows[:-1]).all())
        found = torch.sparse_coo_tensor(
            rows[None], values, parameter.shape, is_coalesced=summed, check_invariants=False
        )
        return found.coalesce()
    return torch.zeros_like(parameter).index_add_(0, rows, values)


def _within(rows: torch.Tensor, size: int) -> bool:
    return not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < size)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)
