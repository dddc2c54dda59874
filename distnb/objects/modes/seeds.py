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
_is_applying = False


def count_seed() -> bool:
    """Note that a seed is set in this process. Return False if the user does not set it."""
    global _seeds
    _seeds += not _is_applying
    return not _is_applying


def random_mode(name: str, capture: Callable[[], Any], apply: Callable[[Any], None]) -> Mode:
    """Return the mode of a random state, which differs if another seed was set, even an equal one."""

    def set_state(numbered: tuple[int, Any]) -> None:
        global _seeds, _is_applying
        _seeds, state = numbered
        _is_applying = True
        try:
            apply(state)
        finally:
            _is_applying = False

    return Mode(name=name, capture=lambda: (_seeds, capture()), apply=set_state, when="end")
