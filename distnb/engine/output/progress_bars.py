"""The choice of text bars for tqdm.auto. The notebook merges the bars of replicas whose progress is equal.

The bars of tqdm.notebook are widgets.
"""

from __future__ import annotations

import importlib
import sys

__all__ = ["install"]


def install() -> None:
    """Have `from tqdm.auto import tqdm` create text bars in this process."""
    try:
        tqdm, plain = importlib.import_module("tqdm"), importlib.import_module("tqdm.std")  # torch has loaded them
    except ImportError:
        return
    sys.modules["tqdm.autonotebook"] = plain
    vars(tqdm)["autonotebook"] = plain
