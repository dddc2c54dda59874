"""Which names of the notebook's namespace are the user's, and not the shell's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["is_user_name", "user_names"]

_SHELL_NAMES = frozenset({"In", "Out", "exit", "quit", "get_ipython", "_dh", "_oh", "_ih", "_i", "_ii", "_iii"})


def is_user_name(name: str, user_ns: Mapping[str, Any]) -> bool:
    """Whether a name is there, and is no name of the shell's or of Python's own."""
    if name not in user_ns or (name.startswith("__") and name.endswith("__")) or name in _SHELL_NAMES:
        return False
    # The shell's own `open`, which the engines have as well.
    return name != "open" or "IPython" not in getattr(getattr(user_ns[name], "__code__", None), "co_filename", "")


def user_names(user_ns: Mapping[str, Any]) -> set[str]:
    """Every name of the user's."""
    return {
        name for name in user_ns if isinstance(name, str) and not name.startswith("_") and is_user_name(name, user_ns)
    }
