"""`distnb.Variable`, which the strategy in force creates."""

from __future__ import annotations

from distnb.strategies.context import get_strategy
from distnb.variables.homes import homes
from distnb.variables.variable import Variable

__all__ = ["Variable"]

homes.current = get_strategy
