"""The recording of a program with torch.profiler, for the notebook."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from numpy import frombuffer, uint8

__all__ = ["Profile"]


class Profile:
    """A context manager that records the main thread, the threads that work for it, and CUDA devices if any."""

    _profiler: Any = None

    def __enter__(self) -> Profile:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._profiler.stop()

    def trace(self) -> Any:
        """Return a gzipped Chrome trace as an array of bytes, or None if recording never began."""
        if self._profiler is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json.gz")
            self._profiler.export_chrome_trace(str(path))
            return frombuffer(path.read_bytes(), uint8)
