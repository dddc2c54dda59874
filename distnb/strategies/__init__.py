"""Strategies: what is to be computed where. Importing this loads no torch."""

from distnb.strategies.base import Strategy, resolve

__all__ = ["Strategy", "resolve"]
