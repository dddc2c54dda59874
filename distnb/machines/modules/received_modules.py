"""The engine's side: the notebook's local modules, in a private folder at the front of `sys.path`.

The files are real, so `inspect`, pdb, reloading, and processes that the engine spawns work as with any module. Their
paths in tracebacks are replaced by those on the notebook's machine.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from distnb.machines.modules.local_modules import ModuleFile
from distnb.objects.modes.python_modes import own_path_entries

__all__ = ["ReceivedModules", "received_modules"]


class ReceivedModules:
    """The received files. `sys.path` belongs to the process, so there is one object: `received_modules`.

    Attributes:
        folder: The folder for the files. It is made when the first file arrives, in a directory that is removed after
            the process has ended.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._users_paths: dict[str, str] = {}

    def receive(self, files: Mapping[str, ModuleFile]) -> None:
        """Write and remove files, by their places. Modules that are loaded stay until they are reloaded."""
        if not files:
            return
        folder = self._made_folder()
        for place, file in files.items():
            path = folder / place
            if path.suffix == ".py":
                # Python does not notice a change within a second that keeps the size.
                Path(cache_from_source(path)).unlink(missing_ok=True)
            if file.content is None:
                self._remove(path, folder)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.new")
            new.write_bytes(file.content)
            new.replace(path)  # in one step, since a worker process of a DataLoader may be reading it
            self._users_paths[str(path)] = file.path
        importlib.invalidate_caches()

    def with_users_paths(self, text: str) -> str:
        """Replace the paths of received files in a text by their paths on the notebook's machine."""
        if self.folder is None or self.folder.parent.name not in text:
            return text
        home = os.path.expanduser("~") + os.sep
        for path, users in self._users_paths.items():
            text = text.replace(path, users)
            if path.startswith(home):  # IPython shortens these
                text = text.replace(f"~{os.sep}{path[len(home) :]}", users)
        return text

    def _made_folder(self) -> Path:
        assert self.folder is not None, "only engines receive modules, and their agent names the folder"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        entry = str(self.folder)
        if entry not in own_path_entries:
            own_path_entries.append(entry)
        if entry not in sys.path:
            sys.path.insert(0, entry)
        return self.folder

    def _remove(self, path: Path, folder: Path) -> None:
        self._users_paths.pop(str(path), None)
        path.unlink(missing_ok=True)
        while (path := path.parent) != folder:
            with suppress(OSError):
                (path / "__pycache__").rmdir()
            try:
                path.rmdir()  # an empty folder would be a namespace package
            except OSError:
                return


received_modules = ReceivedModules()
