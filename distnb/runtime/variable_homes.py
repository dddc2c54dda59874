"""The homes of variables in this process: of single copies, or of the components of one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from distnb.errors import ContextError
from distnb.options import ReduceOp
from distnb.runtime import contexts
from distnb.runtime.base import Owner
from distnb.runtime.this_process import this_process
from distnb.values.structure import map_structure
from distnb.variables.homes import Home

if TYPE_CHECKING:
    import torch

    from distnb.collectives.algorithms.aggregation import Aggregation
    from distnb.runtime.scopes.registration import Registration
    from distnb.variables.variable import Variable

__all__ = ["AloneHome", "ReplicaHome", "home_on_replicas"]


class AloneHome(Home):
    """The home of single copies in this process, made by a strategy that computes here or fetched from replicas.

    Args:
        strategy: The strategy that made the variables.
        is_copy: Whether the variables were made on replicas and fetched to this process, which is not a replica.
    """

    def __init__(self, strategy: Owner, *, is_copy: bool = False) -> None:
        self._strategy = strategy
        self._is_copy = is_copy

    @property
    def device(self) -> torch.device | None:
        if not self._strategy.spec.devices or self._is_copy:
            return None
        from distnb.accelerators import torch_device
        from distnb.topology import parse_device

        return torch_device(parse_device(self._strategy.spec.devices[0]))

    def in_replica(self, *, writing: bool) -> bool:
        innermost = contexts.innermost()
        if innermost is None:
            return False
        strategy, replica = innermost
        if self._is_copy or strategy is self._strategy:
            return replica is not None
        if not self._strategy.is_default:
            raise contexts.mixing(strategy, self._strategy)
        if writing and replica is not None and replica.num_replicas_in_sync > 1:
            raise ContextError(
                f"A variable that was made outside strategy.scope() was assigned to in strategy.run of {strategy!r}: "
                "every replica would change its own copy. Make the variable within `with strategy.scope():`."
            )
        return replica is not None


class ReplicaHome(Home):
    """The home of one strategy's variables on this replica.

    Args:
        registration: The registration that keeps the variables in sync.
        aggregation: Returns the strategy's aggregation on the current process group.
    """

    alone = False

    def __init__(self, registration: Registration, aggregation: Callable[[], Aggregation]) -> None:
        self._registration = registration
        self._aggregation = aggregation
        self.once = registration.shared is not None
        self.whole = []

    @property
    def num_replicas(self) -> int:
        return self._registration.group.size

    @property
    def device(self) -> torch.device | None:
        from distnb.accelerators import torch_device

        return torch_device(self._registration.group.device)

    @property
    def rank(self) -> int:
        return self._registration.group.rank

    @property
    def execution(self) -> Literal["replicated", "split", "single"] | None:
        here = contexts.execution()
        return here.kind if here is not None and here.strategy is self._registration.strategy else None

    def in_replica(self, *, writing: bool) -> bool:
        innermost, execution = contexts.innermost(), self.execution
        if innermost is not None and innermost[0] is not self._registration.strategy:
            raise contexts.mixing(innermost[0], self._registration.strategy)
        if execution is not None:
            return execution == "split"
        return innermost is not None and innermost[1] is not None  # outside every scope is cross-replica context

    def end_loop(self) -> None:
        for each in self.whole:
            each.become_part(self)
        self.whole.clear()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        from distnb.collectives.algorithms.sums import combine

        if self.num_replicas == 1:
            return tensor
        return combine(self._aggregation(), ReduceOp.SUM, [tensor])[0]

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        from distnb.runtime.reduction.gathering import broadcast_like

        group = self._registration.group
        return broadcast_like(group, tensor, 0) if group.size > 1 else tensor

    def every(self, value: Any) -> Sequence[Any]:
        group = self._registration.group
        every = group.all_gather_object(map_structure(lambda one: one.detach().cpu(), value))  # rows: sizes differ
        return [map_structure(lambda one: one.to(self.device), one) for one in every]

    def register(self, variable: Variable) -> None:
        self._registration.register_variable(variable)


def home_on_replicas(strategy: Owner) -> Home:
    """Return the home of a strategy with several replicas: this replica's, or in a notebook the home of copies."""
    process = this_process.replica
    return AloneHome(strategy, is_copy=True) if process is None else process.home_of(strategy)
