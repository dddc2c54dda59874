"""Strategies: the distribution of computations over devices. Importing this package does not load torch."""

from distnb.strategies.base import WORDS, Strategy, class_of, resolve

__all__ = ["WORDS", "Strategy", "class_of", "resolve"]
