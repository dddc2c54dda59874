"""One object takes another's place wherever the notebook sees it."""

from __future__ import annotations

import gc
import sys
from typing import Any

__all__ = ["replace_everywhere"]


def replace_everywhere(old: Any, new: Any, user_ns: dict[str, Any]) -> list[str]:
    """Replace an object in the user's names, and in every list, dict and class that holds it.

    Returns:
        The names, those of the user's own alone.
    """
    names = [name for name, value in user_ns.items() if value is old]
    for name in names:
        user_ns[name] = new
    for holder in gc.get_referrers(old):
        if holder is user_ns:
            continue
        if type(holder) is dict and holder is not sys.modules["__main__"].__dict__:
            # Python remembers what it found in a class: its attributes must be set as such.
            cls = next((each for each in gc.get_referrers(holder) if _is_namespace_of(holder, each)), None)
            for key in [key for key, value in holder.items() if value is old]:
                if cls is None:
                    holder[key] = new
                else:
                    setattr(cls, key, new)
        elif type(holder) is list:
            holder[:] = [new if value is old else value for value in holder]
    return [name for name in names if isinstance(name, str) and not name.startswith("_")]


def _is_namespace_of(holder: dict[Any, Any], owner: Any) -> bool:
    return isinstance(owner, type) and any(part is holder for part in gc.get_referents(owner))
