"""The running statistics of batch norms, averaged over the replicas at the end of each step's backward pass.

A replica updates its statistics with its own slices of the batches. A running mean is linear in its inputs, so
averaging after each step gives the same result as averaging when the statistics are read. For example, two replicas
have batch means of 1 and 3. With momentum 0.1, an old value of 0 becomes 0.1 and 0.3. The average is 0.2, as if both
had seen the mean 2.

Because the average is taken early, every reader finds the same values: in an evaluation or a checkpoint, on one replica
or on all, inside `strategy.run` or outside. What counts is that a forward pass has changed them. The backward pass need
not reach the model: it may be frozen, or have no parameters. After a function of `strategy.run` without a backward
pass, the average is taken at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from distnb.accelerators import torch_device
from distnb.compat import torch_internals
from distnb.compat.torch_internals import NormBase

if TYPE_CHECKING:
    from distnb.collectives.gradients.parameter_groups import Identity
    from distnb.collectives.group.interface import Group

__all__ = ["RunningStatistics", "has_statistics"]


def has_statistics(model: torch.nn.Module) -> bool:
    """Return whether a model may have running statistics that differ between replicas."""
    return any(True for _ in _norms(model))


class _Model:
    """A model with running statistics. Layers that outlive it keep their place.

    Attributes:
        seen: The writes to the statistics when they were last averaged.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._norms: list[weakref.ref[NormBase]] = []
        self.seen: list[int] = []
        self.note()

    def norms(self) -> list[NormBase]:
        """Return the layers with statistics that exist, in an order that all replicas share."""
        model = self._model()
        return list(_norms(model)) if model is not None else [norm for each in self._norms if (norm := each())]

    def note(self) -> None:
        """Count the statistics as averaged."""
        norms = self.norms()
        self._norms = list(map(weakref.ref, norms))
        self.seen = _writes(norms)


class RunningStatistics:
    """The running statistics of one strategy's models.

    Args:
        group: Returns the current process group.
    """

    def __init__(self, group: Callable[[], Group]) -> None:
        self._group = group
        self._models: dict[Identity, _Model] = {}

    def add(self, identity: Identity, model: torch.nn.Module) -> None:
        """Average the statistics of a model, whose identity is the same on all replicas. Idempotent."""
        if identity not in self._models:
            self._models[identity] = _Model(model)

    def living(self) -> set[Identity]:
        """Return the identities of the models of which any layer with statistics exists."""
        self._models = {identity: model for identity, model in self._models.items() if model.norms()}
        return set(self._models)

    def changed(self) -> tuple[Identity, ...]:
        """Return the identities of the models whose statistics were written since the last average."""
        return tuple(identity for identity, model in self._models.items() if _writes(model.norms()) != model.seen)

    def note(self, but: Collection[Identity] = ()) -> None:
        """Count the statistics of all models except some as averaged."""
        for identity, model in self._models.items():
            if identity not in but:
                model.note()

    def average(self, models: Sequence[Identity]) -> None:
        """Set the statistics of layers in training to their mean over all replicas, which must all call this."""
        norms = [norm for identity in models if identity in self._models for norm in self._models[identity].norms()]
        found = list({id(each): each for norm in norms if norm.training for each in _statistics(norm)}.values())
        self.note()
        if not found:
            return
        group = self._group()
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


def _norms(model: torch.nn.Module) -> Iterator[NormBase]:
    """Yield the layers with running statistics. SyncBatchNorm's are already those of the whole batch."""
    for part in model.modules():
        if isinstance(part, NormBase) and not isinstance(part, torch.nn.SyncBatchNorm):
            yield part


def _statistics(norm: NormBase) -> list[torch.Tensor]:
    return [each for each in (norm.running_mean, norm.running_var) if each is not None and not is_lazy(each)]


def _writes(norms: Sequence[NormBase]) -> list[int]:
    """Count the writes to statistics. No value is read, because that would wait for the device."""
    # torch's kernel for batch norms does not count its writes to `running_mean`, but the layer counts its batches.
    found = [each for norm in norms for each in (norm.running_mean, norm.num_batches_tracked)]
    return [each._version for each in found if each is not None and not is_lazy(each) and not each.is_inference()]
