"""Which tensors hold gradients that were aggregated over the replicas."""

from __future__ import annotations

import weakref

import torch

__all__ = ["aggregated", "mark_aggregated"]


class AggregatedTensors:
    """A set of tensors by identity that keeps none of them alive.

    `identities` may be read directly where a call per tensor would cost: an entry goes the moment its
    tensor dies, before the identity can be given to another object. `serial` counts the aggregations of this
    process, `stepped` is its value when an optimizer last stepped.
    """

    def __init__(self) -> None:
        self.identities: dict[int, weakref.ref[torch.Tensor]] = {}
        self.serial = 0
        self.stepped = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Note that this very tensor holds an aggregated gradient."""
        identity = id(tensor)
        if identity not in self.identities:
            forget = self.identities.pop
            self.identities[identity] = weakref.ref(tensor, lambda _: forget(identity, None))

    def discard(self, tensor: torch.Tensor) -> None:
        """Note that this tensor no longer holds one."""
        self.identities.pop(id(tensor), None)

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self.identities


aggregated = AggregatedTensors()


def mark_aggregated(tensor: torch.Tensor) -> None:
    """Accept a tensor as the gradient of a mirrored parameter: it came out of a collective.

    `ReplicaContext.all_reduce` marks what it returns, so that gradients made by `torch.autograd.grad` and
    aggregated by hand pass the optimizer's check.

    Args:
        tensor: The aggregated gradient; the mark is this object's, copies do not have it.
    """
    aggregated.add(tensor)
