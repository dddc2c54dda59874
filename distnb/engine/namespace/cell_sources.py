"""The texts of cells, for tracebacks, pdb, inspect and torch.compile."""

from __future__ import annotations

import linecache

from IPython.core.getipython import get_ipython

from distnb.compat.ipython_internals import name_cell
from distnb.engine.output import telemetry

__all__ = ["remember_source", "remembered"]

remembered: dict[str, str] = {}
"""The texts of the notebook's cells, by file name."""


def remember_source(filename: str, text: str, label: str = "") -> None:
    """Make the text of a cell available under its file name and its name in the notebook ("Cell In[3]")."""
    remembered[filename] = text
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    if label:
        telemetry.remember_cell(filename, label)
    shell = get_ipython()
    if shell is not None and label.startswith("Cell In[") and label[8:-1].isdigit():
        name_cell(shell.compile, filename, int(label[8:-1]))
