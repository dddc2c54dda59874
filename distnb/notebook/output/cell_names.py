"""How people call the notebook's cells."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["cell_name"]


def cell_name(filename: str, shell: InteractiveShell | None = None) -> str:
    """The name of a cell in tracebacks, "Cell In[3]", by what its code objects carry; "" if it is no cell.

    Args:
        shell: Where it ran; None for this process's shell, if it has one.
    """
    ipython = sys.modules.get("IPython")
    if shell is None and ipython is not None:
        shell = ipython.get_ipython()
    name = shell.compile.format_code_name(filename) if shell is not None else None
    return " ".join(name) if name is not None else ""
