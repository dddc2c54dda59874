"""What `strategy.run` has counted since the program began: `steps` and `examples`, for whoever shows progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distnb.runtime import progress as _counted

__all__ = ["examples", "reset", "steps"]

reset = _counted.reset

if TYPE_CHECKING:
    steps: int
    examples: int


def __getattr__(name: str) -> int:
    if name == "steps":
        return _counted.steps
    if name == "examples":
        return _counted.examples
    raise AttributeError(name)
