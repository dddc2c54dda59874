"""The names of classes whose objects stay in the process that made them."""

from __future__ import annotations


def names_missing(internals: str, *, without: str = "") -> str:
    """Return an expression for the names that a file in `distnb/compat` provides but the installed libraries lack.

    Args:
        internals: The file.
        without: A library that is not installed.
    """
    bound = f"__import__('importlib').import_module('distnb.compat.{internals}').BOUND"
    lacks = "not hasattr(__import__('importlib').import_module(module), name)"
    return f"[name for module, name in {bound} if not module.startswith('{without}.') and {lacks}]"
