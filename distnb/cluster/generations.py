"""The generations of an elastic script: its launcher publishes in a file which processes train together.

The file is in the launcher's private directory and is replaced as a whole, so a reader never sees half of it:

    {"number": 2, "members": [0, 1, 3], "devices": ["cpu:0", "cpu:1", "cpu:2"], "lost": [2], "first": 3, …}

Here process 2 was lost, and process 3 replaced it. A member's rank is its place in `members`. Processes answer through
the pipe of the launcher by which they report errors, with `ready-NUMBER` and `done-NUMBER`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["DONE", "READY", "Generation", "Launched", "generation_path", "launched", "note_launched"]

READY, DONE = "ready", "done"


@dataclass(frozen=True)
class Generation:
    """The processes that train together, until one is lost or a new one joins.

    Attributes:
        number: The number of the generation. The processes that started together are number 0.
        members: The numbers of its processes, in the order of their ranks.
        devices: Each member's device.
        lost: The numbers of all processes that were lost so far, some of which may be members.
        first: The number of processes that started together.
        finished: Whether a process has finished the training.
    """

    number: int
    members: tuple[int, ...]
    devices: tuple[str, ...]
    lost: tuple[int, ...] = ()
    first: int = 0
    finished: bool = False

    def write(self, path: Path) -> None:
        """Replace the file."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Generation:
        """Return the content of the file."""
        held: dict[str, Any] = json.loads(path.read_text())
        for name in ("members", "devices", "lost"):
            held[name] = tuple(held[name])
        return cls(**held)


def generation_path(directory: Path) -> Path:
    """Return the path of the file in a launcher's private directory."""
    return directory / "generation.json"


@dataclass(frozen=True)
class Launched:
    """The identity of this process among those of an elastic script.

    Attributes:
        directory: The launcher's private directory.
        number: The number of this process.
        reports: The descriptor of the launcher's pipe.
        pid: The process id. A forked child is not the process that was launched.
    """

    directory: Path
    number: int
    reports: int
    pid: int

    def read(self) -> Generation:
        """Return the latest generation."""
        return Generation.read(generation_path(self.directory))

    def report(self, word: str) -> None:
        """Report READY or DONE to the launcher."""
        os.write(self.reports, f"{word}-{self.number}\n".encode())


_launched: Launched | None = None


def note_launched(directory: Path, number: int, reports: int) -> None:
    """Note that this process runs a script for a launcher. Do nothing if the launcher is not an elastic one."""
    global _launched
    if generation_path(directory).exists():
        _launched = Launched(directory=directory, number=number, reports=reports, pid=os.getpid())


def launched() -> Launched | None:
    """Return this process as one of an elastic script's, or None."""
    return _launched if _launched is not None and _launched.pid == os.getpid() else None
