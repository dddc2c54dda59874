"""Steps of optimizers on this replica's parts of sharded parameters, instead of on the sharded tensors.

The optimizers treat each element separately, so the steps on the parts together are the step on the whole. torch
computes with parts in a fraction of the time that it needs for DTensors, and with all of its operations.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.sharded.parts import local_part

__all__ = ["LocalStep"]


class LocalStep:
    """A step of one optimizer on parts.

    The step's method is called with a substitute for the optimizer, so a step that fails leaves the optimizer's own
    parameters in their places.

    Attributes:
        substitute: An optimizer with parts in place of sharded parameters, of their gradients and of their states.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parts = {each: _part(each) for each in optimized(optimizer) if isinstance(each, DTensor)}
        self._parts = [(each, part, part._version) for each, part in parts.items()]
        self.substitute = object.__new__(type(optimizer))
        vars(self.substitute).update(vars(optimizer))
        self.substitute.param_groups = [
            {**group, "params": [parts.get(each, each) for each in group["params"]]} for group in optimizer.param_groups
        ]
        self.substitute.state = defaultdict(
            dict, {key: each for key, each in optimizer.state.items() if key not in parts}
        )
        for parameter, part in parts.items():
            if parameter in optimizer.state:
                state = optimizer.state[parameter].items()
                self.substitute.state[part] = {key: _local(value) for key, value in state}

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer what the step has changed: its options, its attributes, and new states."""
        substitute = self.substitute
        for group, changed in zip(optimizer.param_groups, substitute.param_groups, strict=True):
            group.update({key: value for key, value in changed.items() if key != "params"})
        kept = {"param_groups": optimizer.param_groups, "state": optimizer.state}
        vars(optimizer).update({**vars(substitute), **kept})
        for parameter, part, version in self._parts:
            if part in substitute.state:
                before = optimizer.state[parameter]
                optimizer.state[parameter] = {
                    key: before[key] if value is _local(before.get(key)) else _sharded(value, part, parameter)
                    for key, value in substitute.state.pop(part).items()
                }
            if part._version != version:
                increment_version(parameter)
        optimizer.state.update(substitute.state)


def _part(parameter: DTensor) -> torch.Tensor:
    part = local_part(parameter).detach()
    gradient = cast("DTensor | None", parameter.grad)
    if gradient is not None:
        is_alike = gradient.placements == parameter.placements
        part.grad = local_part(gradient if is_alike else gradient.redistribute(placements=parameter.placements))
    return part


def _local(value: Any) -> Any:
    return local_part(value) if isinstance(value, DTensor) else value


def _sharded(value: Any, part: torch.Tensor, parameter: DTensor) -> Any:
    """Return a part of a state as a sharded tensor. A value of another shape, such as a number of steps, is whole."""
    if not isinstance(value, torch.Tensor) or value.shape != part.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
