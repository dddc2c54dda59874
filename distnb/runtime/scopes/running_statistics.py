"""Running statistics of batch norms: what the replicas saw of a step, averaged at the end of its backward pass.

A replica's statistics are those of its own slices. Averaged after each step they are what they would be if they were
averaged where they are read, since a running mean is linear in what it is made of; and so whoever reads them, evaluates
with them or saves them, on one replica or on all, inside `strategy.run` or outside, finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from distnb.accelerators import torch_device
from distnb.compat import torch_internals
from distnb.compat.torch_internals import NormBase

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["average", "has_statistics"]


def has_statistics(model: torch.nn.Module) -> bool:
    """Return whether a model may have running statistics."""
    return any(isinstance(part, NormBase) for part in model.modules())


def average(group: Group, models: Iterable[torch.nn.Module]) -> None:
    """Set the statistics of models that are being trained to their mean over the replicas, all of which call this."""
    found = list({id(each): each for model in models for each in _statistics(model)}.values())
    if not found:
        return
    group.note("BatchNorm's running statistics", found)
    device = torch_device(group.device)
    flat = torch.cat([each.to(device) for each in found])  # each is [channels]
    # In float64 the mean of equal numbers is that number: what is equal stays so to the last bit.
    means = flat.detach().to(torch.float64)
    group.all_reduce(means, "mean")
    pieces = means.to(flat.dtype).split([len(each) for each in found])
    # Not a change that autograd has to know of: a second pass through the same graph does not read them.
    torch_internals.copy_each([each.data for each in found], pieces)


def _statistics(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in model.modules():
        if not isinstance(part, NormBase) or isinstance(part, torch.nn.SyncBatchNorm) or not part.training:
            continue  # SyncBatchNorm's are those of the whole batch already
        for statistic in (part.running_mean, part.running_var):
            if statistic is not None and not is_lazy(statistic):
                yield statistic
