"""Interleaved comparisons: A B C A B C …, never A A A B B B.

A machine drifts (turbo, neighbours, page cache), so two blocks that run one after another compare minutes, not
programs. Here each round measures every contender once, in turn, in an order that rotates. A ratio is taken *within* a
round, and the median of those ratios is reported with their range.

Example:
    >>> comparison = compare({"a": lambda: 2.0, "b": lambda: 1.0}, rounds=3)
    >>> comparison.ratio("a", "b").median
    2.0
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Comparison", "Ratio", "Target", "compare", "options", "report", "timed"]

Measure = Callable[[], float]
"""A function that runs a contender once and returns seconds, or any quantity of which less is better."""


def options(about: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options of a benchmark from its command line.

    Args:
        about: The benchmark's docstring.
        defaults: The options with their defaults, which give the types. `False` makes a switch, "" an option without a
            default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser.parse_args()


def timed(call: Callable[[], object], calls: int = 1) -> Measure:
    """Return a measure of a plain function.

    Args:
        call: The function to measure.
        calls: The number of repetitions in one measurement. The measure is the mean of one call.
    """

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    return measure


@dataclass(frozen=True)
class Ratio:
    """The ratio of two contenders, taken within each round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g}× ({self.low:.3g}–{self.high:.3g})"


@dataclass(frozen=True)
class Comparison:
    """The measured values: one per round for each contender."""

    values: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, other: str) -> Ratio:
        """Return `name` divided by `other`, round by round."""
        ratios = [a / b for a, b in zip(self.values[name], self.values[other], strict=True)]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Target:
    """A claim about a ratio: `name` takes at most `at_most` times as much as `other`.

    With `at_least`, the claim is reversed (for quantities of which more is better). `known` is the worst ratio that is
    known to miss the target; None if it is met.
    """

    name: str
    other: str
    at_most: float | None = None
    at_least: float | None = None
    known: float | None = None

    def verdict(self, comparison: Comparison) -> str:
        """Return "met", "MISSED" if the median ratio is as bad as is known, or "LOST" if it is worse."""
        ratio = comparison.ratio(self.name, self.other).median
        if (self.at_most is None or ratio <= self.at_most) and (self.at_least is None or ratio >= self.at_least):
            return "met"
        if self.known is None:
            return "LOST"
        return "MISSED" if (ratio <= self.known if self.at_most is not None else ratio >= self.known) else "LOST"

    def __str__(self) -> str:
        bound = f"≤ {self.at_most:g}×" if self.at_most is not None else f"≥ {self.at_least:g}×"
        return f"{self.name} {bound} {self.other}"


def compare(measures: Mapping[str, Measure], *, rounds: int = 7, warmup: int = 1) -> Comparison:
    """Measure all contenders in turn.

    Args:
        measures: The contenders by name.
        rounds: The number of values for each.
        warmup: The number of earlier rounds, which are not counted.
    """
    names = list(measures)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            value = measures[name]()
            if number >= warmup:
                values[name].append(value)
    return Comparison({name: tuple(kept) for name, kept in values.items()})


def report(
    title: str,
    comparison: Comparison,
    *,
    baseline: str,
    unit: str = "ms",
    scale: float = 1e3,
    targets: Sequence[Target] = (),
) -> bool:
    """Print a table of medians and of ratios to the baseline, then each target with its verdict.

    Args:
        title: The heading.
        comparison: The result of `compare`.
        baseline: The contender whose ratio is 1.
        unit, scale: The form of values: `value * scale` in `unit`.
        targets: The claims to check (see `benchmarks.guard`). Those about contenders that were not measured are absent.

    Returns:
        True if all targets are met, or absent.
    """
    rows = [("", unit, f"ratio to {baseline} (range)")]
    rows += [
        (name, f"{comparison.median(name) * scale:.4g}", str(comparison.ratio(name, baseline)))
        for name in comparison.values
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print(f"\n{title}")
    for row in rows:
        print(f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}")
    verdicts = set()
    for target in targets:
        if not {target.name, target.other} <= comparison.values.keys():
            print(f"  absent: {target}, {title}")
            continue
        verdicts.add(verdict := target.verdict(comparison))
        print(f"  {verdict:>6}: {target} (measured {comparison.ratio(target.name, target.other)}), {title}")
    sys.stdout.flush()
    return verdicts <= {"met"}
