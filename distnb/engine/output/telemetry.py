"""What a replica does, measured from its control thread while the main thread computes. It costs little."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType

import psutil

from distnb.accelerators import allocated_nbytes
from distnb.runtime import step_count
from distnb.wire.messages import TelemetrySample

__all__ = ["remember_cell", "sample", "where_it_failed"]

_process: psutil.Process | None = None
_labels: dict[str, str] = {}
_loaded = time.monotonic()


def remember_cell(filename: str, label: str) -> None:
    """Let samples say where in this cell the replica is; `label` is what people call it, "Cell In[3]"."""
    _labels[filename] = label.replace("Cell In[", "cell ").removesuffix("]") or "cell"


def sample(engine: int, program: int, replica: int) -> TelemetrySample:
    """Measure this process."""
    global _process
    if _process is None:
        _process = psutil.Process()
    return TelemetrySample(
        engine=engine,
        program=program,
        replica=replica,
        seconds=time.monotonic() - _loaded,
        steps=step_count.steps,
        examples=step_count.examples,
        rss_nbytes=int(_process.memory_info().rss),
        device_nbytes=allocated_nbytes(),
        where=_where(),
    )


def _where() -> str:
    """The innermost line of a cell that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        found = _line(frame, frame.f_lineno)
        if found:
            return found
        frame = frame.f_back
    return ""


def where_it_failed(error: BaseException) -> str:
    """The innermost line of a cell that an error came through; "" if it came through none."""
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        found = _line(frame, number) or found
    return found


def _line(frame: FrameType, number: int) -> str:
    label = _labels.get(frame.f_code.co_filename)
    return f"{label}, line {number}" if label is not None else ""
