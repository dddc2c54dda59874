"""tqdm's notebook bars are widgets, whose comms would end on the engine: here they are text bars."""

from __future__ import annotations

import importlib
import sys

__all__ = ["install"]

_WIDGET_BARS = ("notebook", "autonotebook")


def install() -> None:
    """From now on `from tqdm.notebook import tqdm` and `tqdm.auto` give text bars in this process."""
    try:
        tqdm, plain = importlib.import_module("tqdm"), importlib.import_module("tqdm.std")  # torch has loaded them
    except ImportError:
        return
    for name in _WIDGET_BARS:
        sys.modules[f"tqdm.{name}"] = plain
        setattr(tqdm, name, plain)
