"""Random states with the number of the seed from which they come.

A call of `strategy.run` draws numbers on the replicas, whose states are not returned to the notebook until a cell ends.
So equal states of the notebook do not show that a seed was not set again:

    random.seed(1)
    strategy.run(augment)  # the replicas draw numbers
    random.seed(1)         # the notebook's state is the same as before, but the replicas' are to start again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distnb.objects.modes.mode import Mode

__all__ = ["count_seed", "random_mode"]

_seeds = 0


def count_seed() -> None:
    """Note that the user sets a seed in this process."""
    global _seeds
    _seeds += 1


def random_mode(name: str, capture: Callable[[], Any], apply: Callable[[Any], None]) -> Mode:
    """Return the mode of a random state, which differs if another seed was set, even an equal one."""

    def set_state(numbered: tuple[int, Any]) -> None:
        global _seeds
        number, state = numbered
        apply(state)  # which may count as a seed
        _seeds = number

    return Mode(name=name, capture=lambda: (_seeds, capture()), apply=set_state, when="end")
