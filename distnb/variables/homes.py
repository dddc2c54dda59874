"""Where a variable lives: what it asks of the runtime of the strategy that made it. Loads no torch.

Variables know nothing of strategies and runtimes, which register here, at their import, how they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from distnb.variables.variable import Variable

__all__ = ["Home", "homes"]


class Home(Protocol):
    """One strategy, in this process, as its variables see it."""

    @property
    def alone(self) -> bool:
        """Whether there is one copy of each variable, whatever it says of synchronization and aggregation."""

    @property
    def once(self) -> bool:
        """Whether a variable of several replicas is one all the same, without components, whatever it says."""

    @property
    def num_replicas(self) -> int:
        """How many copies there are."""

    @property
    def device(self) -> torch.device | None:
        """Where variables are; None leaves an initial value where it is."""

    def in_replica(self, *, writing: bool) -> bool:
        """Whether the calling thread is in a replica context.

        Raises:
            ContextError: Another strategy is in force.
        """

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the replicas, which all call this. A new tensor if there are several."""

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """What replica 0 holds, on all replicas, which all call this."""

    def every(self, value: Any) -> Sequence[Any]:
        """What each replica gives, in replica order, on all of them, which all call this. Any sizes."""

    def register(self, variable: Variable) -> None:
        """A variable was made: give it replica 0's value and keep it in sync. All replicas call this."""


class _Homes:
    """There is one instance, `homes`.

    Attributes:
        of: Gives the home of a strategy's variables in this process, as it is now: engines come and go.
        current: Gives the strategy in whose scope, or in whose `run`, a variable is being made.
    """

    of: Callable[[Any], Home]
    current: Callable[[], Any]

    def __init__(self) -> None:
        self._several = False
        self._refuse_others: Callable[[], None] | None = None

    def several(self) -> None:
        """There is more than one strategy now: what torch's functions read may be another one's variable."""
        self._several = True
        if self._refuse_others is not None:
            self._refuse_others()

    def once_several(self, refuse_others: Callable[[], None]) -> None:
        """Call this when there are several strategies. With one, torch's functions cost what they cost elsewhere."""
        self._refuse_others = refuse_others
        if self._several:
            refuse_others()


homes = _Homes()
