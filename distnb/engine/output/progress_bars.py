"""tqdm.auto's bars: text, which the notebook merges where replicas are equally far. tqdm.notebook's are widgets."""

from __future__ import annotations

import importlib
import sys

__all__ = ["install"]


def install() -> None:
    """Have `from tqdm.auto import tqdm` give text bars in this process."""
    try:
        tqdm, plain = importlib.import_module("tqdm"), importlib.import_module("tqdm.std")  # torch has loaded them
    except ImportError:
        return
    sys.modules["tqdm.autonotebook"] = plain
    vars(tqdm)["autonotebook"] = plain
