"""What `run` counts: two plain integers, so that counting costs nothing and any thread may read them."""

from __future__ import annotations

__all__ = ["examples", "reset", "steps"]

steps = 0
"""Calls of `strategy.run` that ended well since the program began."""

examples = 0
"""Examples in this replica's slices of the batches given to them."""


def reset() -> None:
    """Count from zero: a program begins."""
    global steps, examples
    steps = examples = 0
