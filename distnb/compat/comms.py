"""The package `comm`, by which a widget reaches the pages. Kernels before ipykernel 6.18, such as Colab's, lack it.

Their ipywidgets 7 has another protocol, so the widgets of a replica are shown as text.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HAS_COMM", "BaseComm"]

BaseComm: Any = object

try:
    from comm.base_comm import BaseComm
except ModuleNotFoundError:
    HAS_COMM = False
else:
    HAS_COMM = True
