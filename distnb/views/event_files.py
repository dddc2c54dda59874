"""TensorBoard event files of the values that `distnb.live` draws, written while they are drawn."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distnb.views.curves import Line
from distnb.views.runs import Run
from distnb.watching.tensorboard_writer import event_writer

__all__ = ["EventFiles"]


class EventFiles:
    """A writer of the runs that begin after its creation, into `FOLDER/RUN/WHEN`.

    If replicas differ, each has its own folder below that, such as `replica 1`.

    Args:
        folder: The folder to pass to `tensorboard --logdir`.

    Raises:
        OptionError: The package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        event_writer()
        self.folder = Path(folder).expanduser()
        self._since = time.time()
        self._writers: dict[Path, Any] = {}
        self._written: dict[tuple[Path, str], int] = {}  # the number of values written, by line

    def write(self, runs: Iterable[Run]) -> None:
        """Write the new values."""
        for run in runs:
            if run.began < self._since:
                continue
            when = time.strftime("%Y%m%d-%H%M%S", time.localtime(run.began))
            folder = self.folder / (re.sub(r"[^\w=.,+() \[\]-]", "_", run.name).strip(". ") or "run") / when
            for curve in run.curves.values():
                for replicas, line in curve.shown().items():
                    alone = len(replicas) == 1 and curve.differs
                    self._write(folder / f"replica {replicas[0]}" if alone else folder, curve.name, line)

    def _write(self, folder: Path, name: str, line: Line) -> None:
        first = self._written.get((folder, name), 0)
        if first == line.record.count:
            return
        if folder not in self._writers:
            self._writers[folder] = event_writer(str(folder))
        for step, value, seconds in line.record.since(first):
            self._writers[folder].add_scalar(name, value, int(step), walltime=seconds)
        self._written[folder, name] = line.record.count

    def flush(self) -> None:
        """Flush all files to the disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers.values():
            writer.close()
