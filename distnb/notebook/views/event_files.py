"""What `distnb.live` drew, as TensorBoard's event files, while it is drawn."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distnb.notebook.views.curves import Line
from distnb.notebook.views.runs import Run
from distnb.watching.tensorboard_writer import event_writer

__all__ = ["EventFiles"]


class EventFiles:
    """Writes the runs that begin from now on: `FOLDER/RUN/WHEN`, and below that `replica 1` where replicas differ.

    Args:
        folder: `tensorboard --logdir` takes it.

    Raises:
        OptionError: The package tensorboard is not there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        event_writer()
        self.folder = Path(folder).expanduser()
        self._since = time.time()
        self._writers: dict[Path, Any] = {}
        self._written: dict[tuple[Path, str], int] = {}  # values of each line

    def write(self, runs: Iterable[Run]) -> None:
        """Write what is new."""
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
        if first == line.record.told:
            return
        if folder not in self._writers:
            self._writers[folder] = event_writer(str(folder))
        for step, value, seconds in line.record.since(first):
            self._writers[folder].add_scalar(name, value, int(step), walltime=seconds)
        self._written[folder, name] = line.record.told

    def flush(self) -> None:
        """Have all on the disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """End it."""
        for writer in self._writers.values():
            writer.close()
