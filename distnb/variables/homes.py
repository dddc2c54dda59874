"""Where a variable lives: what it asks of the runtime of the strategy that made it. Loads no torch.

Variables know nothing of strategies and runtimes. These say at their import how a home is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from distnb.variables.variable import Variable

__all__ = [
    "Home",
    "current_strategy",
    "home_of",
    "register_homes",
    "register_look",
    "register_strategies",
    "several_strategies",
]


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

    def adopt(self, variable: Variable) -> None:
        """A variable was made: give it replica 0's value and keep it in sync. All replicas call this."""


_several = False
_look: Callable[[], None] | None = None
_current: Callable[[], Any] | None = None
_find: Callable[[Any], Home] | None = None


def register_strategies(current: Callable[[], Any]) -> None:
    """Say how the strategy is found that is in force."""
    global _current
    _current = current


def register_homes(find: Callable[[Any], Home]) -> None:
    """Say how a strategy's home in this process is found."""
    global _find
    _find = find


def several_strategies() -> None:
    """There is more than one strategy now: what is read by torch's functions may be another one's variable."""
    global _several
    if not _several:
        _several = True
        if _look is not None:
            _look()


def register_look(look: Callable[[], None]) -> None:
    """Say what sees to it that torch's functions refuse variables of another strategy; called once there are several.

    With one strategy there is nothing to refuse, and torch's functions on variables cost what they cost on parameters.
    """
    global _look
    _look = look
    if _several:
        look()


def current_strategy() -> Any:
    """The strategy in whose scope, or in whose `run`, a variable is being made."""
    assert _current is not None, "distnb.strategies.variable_class was not imported"
    return _current()


def home_of(strategy: Any) -> Home:
    """The home of a strategy's variables in this process, as it is now: engines come and go."""
    assert _find is not None, "a strategy exists, and its module has registered this"
    return _find(strategy)
