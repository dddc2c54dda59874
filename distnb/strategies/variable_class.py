"""`distnb.Variable`, which is made under the strategy that is in force."""

from __future__ import annotations

from distnb.strategies.context import get_strategy
from distnb.variables.homes import register_strategies
from distnb.variables.variable import Variable

__all__ = ["Variable"]

register_strategies(get_strategy)
