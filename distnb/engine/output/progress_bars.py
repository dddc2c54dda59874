"""The choice of text bars for tqdm.auto. The notebook merges the bars of replicas whose progress is equal.

The bars of tqdm.notebook are widgets, if the kernel can show those of replicas.
"""

from __future__ import annotations

import importlib
import sys

from distnb.compat.ipython_internals import HAS_COMM

__all__ = ["install"]


def install() -> None:
    """Have `from tqdm.auto import tqdm` create text bars in this process; without comms, tqdm.notebook too."""
    try:
        tqdm, plain = importlib.import_module("tqdm"), importlib.import_module("tqdm.std")  # torch has loaded them
    except ImportError:
        return
    sys.modules["tqdm.autonotebook"] = plain
    vars(tqdm)["autonotebook"] = plain
    if not HAS_COMM:
        sys.modules["tqdm.notebook"] = plain
