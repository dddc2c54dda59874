"""An optimizer's step in host memory, for variables of which the replicas hold copies on accelerators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from distnb.errors import GradientError
from distnb.runtime.central.memory_layout import on_host

__all__ = ["check_on_host", "on_the_host"]

_ON_DEVICE_ONLY = ("capturable", "differentiable")


def check_on_host(optimizer: Optimizer, of_torch: bool) -> None:
    """Refuse what cannot update variables elsewhere than where its parameters are.

    Args:
        optimizer: It holds parameters on an accelerator.
        of_torch: It is one of torch's own, which find all that they need in their groups and their state.

    Raises:
        GradientError: It says which optimizer, and the cure.
    """
    name = type(optimizer).__name__
    if not of_torch:
        raise GradientError(
            f"{name}.step(): under central storage on accelerators a variable is updated in the host's memory, once, "
            "which works for torch.optim's own optimizers that treat each parameter by itself. This one may hold "
            "on to the device's parameters elsewhere. Use torch.optim.Adam, SGD or the like, CPU replicas, or "
            "MirroredStrategy."
        )
    given = sorted({option for group in optimizer.param_groups for option in _ON_DEVICE_ONLY if group.get(option)})
    if given:
        raise GradientError(
            f"{name} was made with {given[0]}=True, which needs its parameters on the device: under central storage "
            "they are updated in the host's memory. Leave it out, or use MirroredStrategy."
        )


@contextmanager
def on_the_host(optimizer: Optimizer, masters: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """While this is entered, an optimizer holds tensors of the host in place of some of its parameters.

    Args:
        optimizer: Has a gradient for each of these parameters. What it keeps for them is on the host from then on.
        masters: Such a parameter, and the tensor on the host that is to be updated.
    """
    if not masters:
        yield
        return
    hosts = {id(parameter): _with_gradient(parameter, master) for parameter, master in masters.items()}
    kept = optimizer.state
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for parameter, values in kept.items():
        host = hosts.get(id(parameter))
        if host is not None:
            values.update({key: value.cpu() for key, value in values.items() if _is_elsewhere(value)})
        state[parameter if host is None else host] = values
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.state = state
        for group in optimizer.param_groups:
            group["params"] = [hosts.get(id(parameter), parameter) for parameter in group["params"]]
            group.update({key: value.cpu() for key, value in group.items() if _is_elsewhere(value)})
        with torch.device("cpu"):  # what it begins to keep is made here
            yield
    finally:
        optimizer.state = kept
        for parameter in masters:
            if values := state.get(hosts[id(parameter)]):
                kept[parameter] = values
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in before.items() if key == "params" or _is_elsewhere(value)})


def _with_gradient(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "others are not stepped"
    master.requires_grad_(parameter.requires_grad)
    master.grad = parameter.grad.detach().cpu()
    return master


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not on_host(value)
