"""Homes of variables: what a variable needs from the runtime of the strategy that made it. Loads no torch.

Variables do not import strategies or runtimes. A strategy has a `home`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from distnb.variables.settings import Settings
    from distnb.variables.variable import SyncOnReadVariable, Variable

__all__ = ["Home", "homes"]


class Home:
    """The view that variables have of their strategy in this process. The base class has one copy of each variable.

    Attributes:
        alone: True if there is one copy of each variable, regardless of its synchronization and aggregation.
        once: True if a variable of several replicas is still a single one without components, regardless of its
            settings.
        whole: The ON_READ variables whose components hold the whole value on each replica, while a loop is replicated.
    """

    alone = True
    once = False
    whole: list[SyncOnReadVariable]

    @property
    def num_replicas(self) -> int:
        """The number of copies."""
        return 1

    @property
    def device(self) -> torch.device | None:
        """The device of new variables; None leaves an initial value on its own device."""
        return None

    @property
    def rank(self) -> int:
        """The replica id of this process."""
        return 0

    @property
    def execution(self) -> Literal["replicated", "split", "single"] | None:
        """The mode of the loop that the calling thread is in, see `contexts.Execution`; None outside a loop."""
        return None

    def in_replica(self, *, writing: bool) -> bool:
        """Return whether the calling thread is in a replica context.

        Raises:
            ContextError: Another strategy is in force.
        """
        raise NotImplementedError

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the replicas, as a new tensor if there are several. All replicas call this."""
        return tensor

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return replica 0's tensor on all replicas. All replicas call this."""
        return tensor

    def every(self, value: Any) -> Sequence[Any]:
        """Return every replica's value, in replica order. Sizes may differ. All replicas call this."""
        return [value]

    def end_loop(self) -> None:
        """Turn components that hold a whole value back into parts: a replicated loop has ended on all replicas."""

    def create(self, value: torch.Tensor, settings: Settings) -> Variable | None:
        """Return a variable of the home's own kind that holds this value, or None if the home has no own kind."""
        return None

    def register(self, variable: Variable) -> None:
        """Give a new variable replica 0's value, and keep it in sync. All replicas call this."""


class _Homes:
    """Functions that find homes. `homes` is the only instance.

    Attributes:
        current: Returns the strategy in whose scope, or in whose `run`, a variable is being created.
    """

    current: Callable[[], Any]


homes = _Homes()
