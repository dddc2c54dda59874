"""How sets of numbers are written for people."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ranges"]


def ranges(numbers: Iterable[int]) -> list[str]:
    """0, 1, 2 and 5 as "0-2" and "5"."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]
