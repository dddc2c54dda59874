"""Where the variables of strategies live in this process: alone, or as the components of one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distnb.errors import ContextError
from distnb.options import ReduceOp
from distnb.runtime import contexts
from distnb.runtime.base import DEFAULT, is_in_process
from distnb.runtime.contexts import mixing
from distnb.runtime.this_process import this_process
from distnb.values.structure import map_structure
from distnb.variables.homes import Home, homes

if TYPE_CHECKING:
    import torch

    from distnb.collectives.algorithms.aggregation import Aggregation
    from distnb.runtime.scopes.registration import Registration
    from distnb.variables.variable import Variable

__all__ = ["ReplicaHome"]


class _Alone:
    """One copy, in this process: under the default and one-device strategies, and of a copy fetched from replicas.

    Args:
        strategy: Which one it is.
        is_copy: It was made on replicas, and this process is none.
    """

    alone = True
    once = False
    num_replicas = 1

    def __init__(self, strategy: Any, *, is_copy: bool) -> None:
        self._strategy = strategy
        self._is_copy = is_copy

    @property
    def device(self) -> torch.device | None:
        """That of a one-device strategy."""
        if not self._strategy.spec.devices or self._is_copy:
            return None
        from distnb.accelerators import torch_device
        from distnb.topology import parse_device

        return torch_device(parse_device(self._strategy.spec.devices[0]))

    def in_replica(self, *, writing: bool) -> bool:
        """Whether a function that `run` called is under way."""
        innermost = contexts.innermost()
        if innermost is None:
            return False
        strategy, replica = innermost
        if self._is_copy or strategy is self._strategy:
            return replica is not None
        if self._strategy.spec.kind != DEFAULT:
            raise mixing(strategy, self._strategy)
        if writing and replica is not None and replica.num_replicas_in_sync > 1:
            raise ContextError(
                f"A variable that was made outside strategy.scope() was assigned to in strategy.run of {strategy!r}: "
                "every replica would change a copy of its own. Make the variable within `with strategy.scope():`."
            )
        return replica is not None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor

    def every(self, value: Any) -> Sequence[Any]:
        """The value alone."""
        return [value]

    def register(self, variable: Variable) -> None:
        """Nothing: there is nobody to be in sync with."""


class ReplicaHome:
    """The variables of one strategy, as this replica holds them.

    Args:
        registration: What keeps them in sync.
        aggregation: Gives the way in which the strategy adds up, on the group of the present generation.
    """

    alone = False

    def __init__(self, registration: Registration, aggregation: Callable[[], Aggregation]) -> None:
        self._registration = registration
        self._aggregation = aggregation

    @property
    def once(self) -> bool:
        """Whether the replicas' variables are the same memory."""
        return self._registration.shared is not None

    @property
    def num_replicas(self) -> int:
        """As many as the team has."""
        return self._registration.group.size

    @property
    def device(self) -> torch.device | None:
        """This replica's."""
        from distnb.accelerators import torch_device

        return torch_device(self._registration.group.device)

    def in_replica(self, *, writing: bool) -> bool:
        """Whether a function that `run` called is under way; outside every scope is cross-replica context."""
        innermost = contexts.innermost()
        if innermost is None:
            return False
        if innermost[0] is not self._registration.strategy:
            raise mixing(innermost[0], self._registration.strategy)
        return innermost[1] is not None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the replicas."""
        from distnb.collectives.algorithms.sums import combine

        if self.num_replicas == 1:
            return tensor
        return combine(self._aggregation(), ReduceOp.SUM, [tensor])[0]

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replica 0's."""
        from distnb.runtime.reduction.gathering import broadcast_like

        group = self._registration.group
        return broadcast_like(group, tensor, 0) if group.size > 1 else tensor

    def every(self, value: Any) -> Sequence[Any]:
        """Each replica's, on the host where they travel: rows, whose number differs."""
        from distnb.accelerators import torch_device

        group = self._registration.group
        if group.size == 1:
            return [value]
        device = torch_device(group.device)
        every = group.all_gather_object(map_structure(lambda one: one.detach().cpu(), value))
        return [map_structure(lambda one: one.to(device), one) for one in every]

    def register(self, variable: Variable) -> None:
        """Replica 0's value for all; a mirrored one is kept in sync from then on."""
        self._registration.take_variable(variable)


def _home_of(strategy: Any) -> Home:
    if is_in_process(strategy.spec):
        return _Alone(strategy, is_copy=False)
    process = this_process.replica
    if process is None:
        return _Alone(strategy, is_copy=True)
    return process.home_of(strategy)


homes.of = _home_of
