"""The distinction between the user's names in the notebook's namespace and those of the shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["is_user_name", "user_names"]

_SHELL_NAMES = frozenset({"In", "Out", "exit", "quit", "get_ipython", "_dh", "_oh", "_ih", "_i", "_ii", "_iii"})


def is_user_name(name: str, user_ns: Mapping[str, Any]) -> bool:
    """Return whether a name exists and belongs neither to the shell nor to Python."""
    if name not in user_ns or (name.startswith("__") and name.endswith("__")) or name in _SHELL_NAMES:
        return False
    # IPython replaces `open` by a function of its own, and the engines have that too.
    return name != "open" or "IPython" not in getattr(getattr(user_ns[name], "__code__", None), "co_filename", "")


def user_names(user_ns: Mapping[str, Any]) -> set[str]:
    """Return all names of the user."""
    return {
        name for name in user_ns if isinstance(name, str) and not name.startswith("_") and is_user_name(name, user_ns)
    }
