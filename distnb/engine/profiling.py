"""A program as torch.profiler sees it, on its way to the notebook."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from numpy import frombuffer, uint8

__all__ = ["Profile"]


class Profile:
    """Records what the main thread, and those that work for it, do within. On devices, too, where there are some."""

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
        """A Chrome trace as an array of gzip's bytes, which travel as they are; None if it never began."""
        if self._profiler is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json.gz")
            self._profiler.export_chrome_trace(str(path))
            return frombuffer(path.read_bytes(), uint8)
