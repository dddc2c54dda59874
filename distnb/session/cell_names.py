"""How people call the notebook's cells."""

from __future__ import annotations

import sys

__all__ = ["cell_name"]


def cell_name(filename: str) -> str:
    """The name of a cell in tracebacks, "Cell In[3]", by what its code objects carry; "" if it is no cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name = shell.compile.format_code_name(filename) if shell is not None else None
    return " ".join(name) if name is not None else ""
