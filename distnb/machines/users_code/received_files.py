"""The engine's side: the files of the notebook's folders, in private folders at the front of `sys.path`.

The files are real, so `inspect`, pdb, reloading, and processes that the engine spawns work as with any module.
Tracebacks show the paths on the notebook's machine (`distnb.frames.users_folders`).
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from distnb.frames import users_folders
from distnb.objects.modes.python_modes import own_path_entries
from distnb.wire.messages import EngineTask

__all__ = ["FilesWritten", "WriteFiles"]


@dataclass(frozen=True)
class FilesWritten:
    """The answer to an order: the files are written, or could not be for the reason `error`."""

    engine: int
    number: int
    error: str = ""


@dataclass(frozen=True)
class WriteFiles(EngineTask):
    """Order to write files. Modules that are loaded stay until they are reloaded.

    Attributes:
        number: The number of the order.
        folders: The paths of the folders on the notebook's machine.
        files: The contents by place (see `SentFolders.read`); None for a file that no longer exists.
        whole: Whether the message has all files, so that the engine removes any other that it has.
    """

    number: int
    folders: tuple[str, ...]
    files: Mapping[str, bytes | None]
    whole: bool

    def carry_out(self, engine: int, directory: Path) -> FilesWritten:
        """Write and remove the files, in a folder that is removed after the process has ended."""
        folder = directory / f"folders-{engine}"
        try:
            if self.whole and folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700, exist_ok=True)
            for place, content in self.files.items():
                _write(folder, place, content)
            _search(folder, self.folders)
        except OSError as error:
            return FilesWritten(engine, self.number, str(error))
        importlib.invalidate_caches()
        return FilesWritten(engine, self.number)


def _write(directory: Path, place: str, content: bytes | None) -> None:
    path = directory / place
    if path.suffix == ".py":
        # Python does not notice a change within a second that keeps the size.
        Path(cache_from_source(path)).unlink(missing_ok=True)
    if content is None:
        _remove(path, directory)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.replace(path)  # in one step, since a worker process of a DataLoader may be reading it


def _remove(path: Path, directory: Path) -> None:
    path.unlink(missing_ok=True)
    while (path := path.parent).parent != directory:
        with suppress(OSError):
            shutil.rmtree(path / "__pycache__")
        try:
            path.rmdir()  # an empty folder would be a namespace package
        except OSError:
            return


def _search(directory: Path, folders: Sequence[str]) -> None:
    """Make `sys.path` begin with the received folders."""
    entries = [str(directory / str(number)) for number in range(len(folders))]
    for entry, folder in zip(entries, folders, strict=True):
        Path(entry).mkdir(exist_ok=True)
        users_folders[os.path.join(entry, "")] = os.path.join(folder, "")
    if own_path_entries[: len(entries)] != entries:
        own_path_entries[:] = entries
        sys.path[:] = [*entries, *(each for each in sys.path if each not in entries)]
