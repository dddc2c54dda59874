"""Strategies: what is to be computed where. Importing this loads no torch."""

from distnb.strategies.base import WORDS, Strategy, class_of, resolve

__all__ = ["WORDS", "Strategy", "class_of", "resolve"]
