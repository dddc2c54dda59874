"""Python's tables of threads, which `threading.enumerate` copies in five calls."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["active", "starting"]

active: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
starting: dict[Any, threading.Thread] = threading._limbo  # type: ignore[attr-defined]
