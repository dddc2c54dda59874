"""Where a variable lives: what it asks of the runtime of the strategy that made it. Loads no torch.

Variables know nothing of strategies and runtimes, which register here, at their import, how they are found.
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
    """One strategy in this process, as its variables see it: here, with one copy of each.

    Attributes:
        alone: Whether there is one copy of each variable, whatever it says of synchronization and aggregation.
        once: Whether a variable of several replicas is one all the same, without components, whatever it says.
        whole: The ON_READ variables whose components hold the whole value on each replica, while a loop is replicated.
    """

    alone = True
    once = False
    whole: list[SyncOnReadVariable]

    @property
    def num_replicas(self) -> int:
        """How many copies there are."""
        return 1

    @property
    def device(self) -> torch.device | None:
        """Where variables are; None leaves an initial value where it is."""
        return None

    @property
    def rank(self) -> int:
        """Which replica this process is."""
        return 0

    @property
    def execution(self) -> Literal["replicated", "split", "single"] | None:
        """How replicas run the loop that the calling thread is in, see `contexts.Execution`; None outside one."""
        return None

    def in_replica(self, *, writing: bool) -> bool:
        """Whether the calling thread is in a replica context. Another strategy in force is a ContextError."""
        raise NotImplementedError

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the replicas, which all call this. A new tensor if there are several."""
        return tensor

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """What replica 0 holds, on all replicas, which all call this."""
        return tensor

    def every(self, value: Any) -> Sequence[Any]:
        """What each replica gives, in replica order, on all of them, which all call this. Any sizes."""
        return [value]

    def end_loop(self) -> None:
        """Make parts again of the components that hold a whole value: a replicated loop has ended on all replicas."""

    def create(self, value: torch.Tensor, settings: Settings) -> Variable | None:
        """A variable of a kind of the home's own, that holds this value; None: of the usual ones."""
        return None

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


homes = _Homes()
