"""Running statistics of batch norms: what the replicas saw of a step, averaged at the end of its backward pass.

A replica's statistics are those of its own slices. Averaged after each step they are what they would be if they were
averaged where they are read, since a running mean is linear in what it is made of; and so whoever reads them, evaluates
with them or saves them, on one replica or on all, inside `strategy.run` or outside, finds the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from distnb.accelerators import torch_device

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["RunningStatistics"]


class RunningStatistics:
    """The running means and variances of the models that one strategy's scopes made, on this replica.

    Args:
        group: Gives the process group of the present generation.
    """

    def __init__(self, group: Callable[[], Group]) -> None:
        self._group = group
        self._models: weakref.WeakKeyDictionary[object, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()

    def take(self, key: object, model: torch.nn.Module) -> None:
        """Average those of a model from now on, if it has any.

        Args:
            key: What names the model in `average`.
            model: Made in a scope, on all replicas.
        """
        if any(isinstance(part, _NormBase) for part in model.modules()):
            self._models[key] = weakref.ref(model)

    def average(self, keys: Sequence[object]) -> None:
        """Set the statistics of models that are being trained to their mean over the replicas. All replicas call this.

        Args:
            keys: The models that a backward pass has reached, the same on every replica.
        """
        if not self._models:
            return
        found = list({id(each): each for key in keys for each in self._of(key)}.values())
        if not found:
            return
        group = self._group()
        group.note("BatchNorm's running statistics", found)
        device = torch_device(group.device)
        flat = torch.cat([each.to(device) for each in found])  # each is [channels]
        # In float64 the mean of equal numbers is that number: what is equal stays so to the last bit.
        means = flat.detach().to(torch.float64)
        group.all_reduce(means, "mean")
        pieces = means.to(flat.dtype).split([len(each) for each in found])
        # Not a change that autograd has to know of: a second pass through the same graph does not read them.
        torch._foreach_copy_([each.data for each in found], pieces)

    def _of(self, key: object) -> Iterator[torch.Tensor]:
        reference = self._models.get(key)
        model = reference() if reference is not None else None
        for part in model.modules() if model is not None else ():
            if not isinstance(part, _NormBase) or isinstance(part, torch.nn.SyncBatchNorm) or not part.training:
                continue  # SyncBatchNorm's are those of the whole batch already
            for statistic in (part.running_mean, part.running_var):
                if statistic is not None and not is_lazy(statistic):
                    yield statistic
