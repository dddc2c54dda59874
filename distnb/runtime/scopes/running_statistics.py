"""The running statistics of batch norms, averaged over the replicas at the end of each step's backward pass.

A replica updates its statistics with its own slices of the batches. A running mean is linear in its inputs, so
averaging after each step gives the same result as averaging when the statistics are read. For example, two replicas
have batch means of 1 and 3. With momentum 0.1, an old value of 0 becomes 0.1 and 0.3. The average is 0.2, as if both
had seen the mean 2.

Because the average is taken early, every reader finds the same values: in an evaluation or a checkpoint, on one replica
or on all, inside `strategy.run` or outside.
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
    """Set the running statistics of models in training to their mean over all replicas, which must all call this."""
    found = list({id(each): each for model in models for each in _statistics(model)}.values())
    if not found:
        return
    group.note("BatchNorm's running statistics", found)
    device = torch_device(group.device)
    flat = torch.cat([each.to(device) for each in found])  # each is [channels]
    # In float64 the mean of equal float32 numbers is exactly that number, so equal statistics keep all their bits.
    means = flat.detach().to(torch.float64)
    group.all_reduce(means, "mean")
    pieces = means.to(flat.dtype).split([len(each) for each in found])
    # `.data` hides the change from autograd, which would refuse a second backward pass through the same graph. That
    # pass does not read the statistics.
    torch_internals.copy_each([each.data for each in found], pieces)


def _statistics(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in model.modules():
        if not isinstance(part, NormBase) or isinstance(part, torch.nn.SyncBatchNorm) or not part.training:
            continue  # SyncBatchNorm's statistics are already those of the whole batch
        for statistic in (part.running_mean, part.running_var):
            if statistic is not None and not is_lazy(statistic):
                yield statistic
