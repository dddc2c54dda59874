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
from importlib.util import cache_from_source
from pathlib import Path

from distnb.frames import users_folders
from distnb.objects.modes.python_modes import own_path_entries

__all__ = ["ReceivedFiles", "received_files"]


class ReceivedFiles:
    """The received files. `sys.path` belongs to the process, so there is one object: `received_files`."""

    def __init__(self) -> None:
        self._places: set[str] = set()

    def write(self, directory: Path, folders: Sequence[str], files: Mapping[str, bytes | None], *, whole: bool) -> None:
        """Write and remove files. Modules that are loaded stay until they are reloaded.

        Args:
            directory: The folder of all received folders. It is removed after the process has ended.
            folders: The paths of the folders on the notebook's machine.
            files: The contents by place; None for a file to remove.
            whole: Whether to remove all other files.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        others = self._places - files.keys() if whole else ()
        for place, content in {**files, **dict.fromkeys(others)}.items():
            self._write(directory, place, content)
        self._search(directory, folders)
        importlib.invalidate_caches()

    def _write(self, directory: Path, place: str, content: bytes | None) -> None:
        path = directory / place
        if path.suffix == ".py":
            # Python does not notice a change within a second that keeps the size.
            Path(cache_from_source(path)).unlink(missing_ok=True)
        if content is None:
            self._places.discard(place)
            self._remove(path, directory)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(content)
        new.replace(path)  # in one step, since a worker process of a DataLoader may be reading it
        self._places.add(place)

    def _search(self, directory: Path, folders: Sequence[str]) -> None:
        """Make `sys.path` begin with the received folders."""
        entries = [str(directory / str(number)) for number in range(len(folders))]
        if own_path_entries[: len(entries)] == entries:
            return
        for entry, folder in zip(entries, folders, strict=True):
            Path(entry).mkdir(exist_ok=True)
            users_folders[os.path.join(entry, "")] = os.path.join(folder, "")
        own_path_entries[:] = entries
        sys.path[:] = [*entries, *(each for each in sys.path if each not in entries)]

    def _remove(self, path: Path, directory: Path) -> None:
        path.unlink(missing_ok=True)
        while (path := path.parent).parent != directory:
            with suppress(OSError):
                shutil.rmtree(path / "__pycache__")
            try:
                path.rmdir()  # an empty folder would be a namespace package
            except OSError:
                return


received_files = ReceivedFiles()
