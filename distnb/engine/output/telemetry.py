"""What a replica does, measured from its control thread while the main thread computes. It costs little."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable
from types import FrameType

import psutil

from distnb.accelerators import allocated_nbytes
from distnb.runtime import step_count
from distnb.wire.messages import TelemetrySample

__all__ = ["innermost", "remember_cell", "sample", "where_it_failed"]

_labels: dict[str, str] = {}
_loaded = time.monotonic()


def remember_cell(filename: str, label: str) -> None:
    """Let samples say where in this cell the replica is; `label` is what people call it, "Cell In[3]"."""
    _labels[filename] = label.replace("Cell In[", "cell ").removesuffix("]") or "cell"


def sample(engine: int, program: int, replica: int) -> TelemetrySample:
    """Measure this process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return TelemetrySample(
        engine=engine,
        program=program,
        replica=replica,
        seconds=time.monotonic() - _loaded,
        steps=step_count.steps,
        examples=step_count.examples,
        rss_nbytes=int(psutil.Process().memory_info().rss),
        device_nbytes=allocated_nbytes(),
        where=innermost(traceback.walk_stack(frame)) if frame is not None else "",
    )


def where_it_failed(error: BaseException) -> str:
    """The innermost line of a cell that an error came through; "" if it came through none."""
    return innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def innermost(places: Iterable[tuple[FrameType, int]]) -> str:
    """The first of these frames and lines that is of a cell, for people."""
    for frame, number in places:
        label = _labels.get(frame.f_code.co_filename)
        if label is not None:
            return f"{label}, line {number}"
    return ""
