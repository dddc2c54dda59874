"""The choice of the replicas that a view shows one by one, if there are too many for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

__all__ = ["MOST_SHOWN", "noteworthy", "others", "unlikeness"]

MOST_SHOWN = 32
"""The most replicas that a table or a picture shows one by one. Readers do not look at more, and each takes bandwidth
in every update of a running cell."""


def noteworthy(scores: Mapping[int, float]) -> list[int]:
    """Return at most `MOST_SHOWN` of the keys, in ascending order: those with the highest scores.

    Of keys with equal scores, the first ones count.
    """
    if len(scores) <= MOST_SHOWN:
        return sorted(scores)
    return sorted(sorted(scores, key=lambda key: (-scores[key], key))[:MOST_SHOWN])


def unlikeness(values: Mapping[int, float]) -> dict[int, float]:
    """Return the distance of each value from the median, relative to the largest distance."""
    if not values:
        return {}
    middle = statistics.median(values.values())
    far = {key: abs(value - middle) for key, value in values.items()}
    most = max(far.values()) or 1.0
    return {key: distance / most for key, distance in far.items()}


def others(shown: int, total: int, who: str = "replica") -> str:
    """Return a text about those that are not shown, such as "and 968 other replicas"; "" if all are shown."""
    left = total - shown
    return f"and {left:,} other {who}{'s' if left > 1 else ''}" if left else ""
