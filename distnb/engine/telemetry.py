"""What a replica does, measured from its control thread while the main thread computes. It costs little."""

from __future__ import annotations

import sys
import threading
import time

import psutil

from distnb.accelerators import allocated_nbytes
from distnb.runtime import progress
from distnb.wire.messages import TelemetrySample

__all__ = ["program_began", "remember_cell", "sample"]

_process: psutil.Process | None = None
_labels: dict[str, str] = {}
_loaded = time.monotonic()
_steps_before = _examples_before = 0


def program_began() -> None:
    """A program begins: `progress` counts it from zero, and samples go on counting."""
    global _steps_before, _examples_before
    _steps_before += progress.steps
    _examples_before += progress.examples
    progress.reset()


def remember_cell(filename: str, label: str) -> None:
    """Let samples say where in this cell the replica is.

    Args:
        filename: What the cell's code objects carry.
        label: How people call it, "Cell In[3]".
    """
    _labels[filename] = label.replace("Cell In[", "cell ").removesuffix("]") or "cell"


def sample(engine: int, program: int, replica: int) -> TelemetrySample:
    """Measure this process.

    Args:
        engine, program, replica: What the sample is marked with.
    """
    global _process
    if _process is None:
        _process = psutil.Process()
    return TelemetrySample(
        engine=engine,
        program=program,
        replica=replica,
        seconds=time.monotonic() - _loaded,
        steps=_steps_before + progress.steps,
        examples=_examples_before + progress.examples,
        rss_nbytes=int(_process.memory_info().rss),
        device_nbytes=allocated_nbytes(),
        where=_where(),
    )


def _where() -> str:
    """The innermost line of a cell that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        label = _labels.get(frame.f_code.co_filename)
        if label is not None:
            return f"{label}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""
