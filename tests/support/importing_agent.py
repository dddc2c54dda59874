"""An agent whose import does what DISTNB_TEST_IMPORT says: `thread` starts a lasting thread, `stall` never returns."""

from __future__ import annotations

import os
import threading
import time

import numpy.random  # noqa: F401  # its state is chosen at its import

from tests.support.plain_agent import install

__all__ = ["install"]

what = os.environ.get("DISTNB_TEST_IMPORT", "")
thread = threading.Thread(target=threading.Event().wait, daemon=True)
if what == "thread":
    thread.start()
if what == "stall":
    time.sleep(1000)
