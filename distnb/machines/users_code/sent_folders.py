"""The notebook's side: the files of the folders that `--sync` sends.

A folder is sent with every Python file in it, and with all files of its packages (folders with an `__init__.py`), for
`importlib.resources`. The folder is an entry of `sys.path` on the engines, so they import its modules by the names that
they have here. Nothing is fetched on demand, when an import fails: the workers of a DataLoader have no connection to
the notebook, and an engine that has another module of the same name would import that one.
"""

from __future__ import annotations

import importlib.machinery
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distnb.errors import OptionError
from distnb.frames import OWN

__all__ = ["SentFolders", "changes", "read_folders"]

_MOST_FILES = 10_000
_MOST_NBYTES = 64 << 20
_MOST_VISITED = 100_000
_RECENT_NS = 2_000_000_000  # the coarsest clock of a file system
_COMPILED = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
_ENVIRONMENT = "pyvenv.cfg"  # the file that marks a virtual environment
_OWN = os.path.realpath(OWN)


def changes(files: Mapping[str, bytes], earlier: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return the content of each file that is new or has changed, and None for each that no longer exists."""
    changed: dict[str, bytes | None] = {
        place: content for place, content in files.items() if earlier.get(place) != content
    }
    return changed | dict.fromkeys(earlier.keys() - files.keys())


class SentFolders:
    """The reader of the folders. Files that have not changed are not read again.

    Args:
        folders: The paths of the folders. The engines search them in this order.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders
        self._latest: Mapping[str, bytes] = {}
        self._states: dict[str, tuple[int, ...]] = {}  # by place, the facts that a change of the file changes

    def read(self) -> Mapping[str, bytes]:
        """Return the current files; the same object if nothing has changed.

        The keys are the files' places: the number of the folder, and the path in it ("0/package/module.py").

        Raises:
            OptionError: The folders have too many files, or too large ones.
        """
        files: dict[str, bytes] = {}
        nbytes = 0
        for number, folder in enumerate(self._folders):
            for within in _files_in(folder):
                place = f"{number}/{within}"
                content = self._read_file(os.path.join(folder, within), place)
                if content is None:
                    continue
                files[place] = content
                nbytes += len(content)
                if len(files) > _MOST_FILES or nbytes > _MOST_NBYTES:
                    raise _too_much(folder, files)
        if files != self._latest:
            self._latest = files
        return self._latest

    def _read_file(self, path: str, place: str) -> bytes | None:
        """Return the current content of a file, or None if it cannot be read."""
        try:
            status = os.stat(path)
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if self._states.get(place) == state and place in self._latest:
                return self._latest[place]
            if not stat.S_ISREG(status.st_mode):
                return None
            with open(path, "rb") as file:
                content = file.read(_MOST_NBYTES + 1)  # a larger one is refused
        except OSError:
            return None
        # A second change within a tick of the file system's clock would leave the state unchanged.
        is_recent = time.time_ns() - status.st_mtime_ns < _RECENT_NS
        self._states[place] = () if is_recent else state
        return content


def read_folders(sync: Any) -> tuple[str, ...]:
    """Return the absolute paths of the folders that the option `sync` names.

    Args:
        sync: True for the notebook's own folder; or a path, a text with commas between paths, or a sequence of paths.

    Raises:
        OptionError: One of them is no folder, or has too many files, or too large ones.
    """
    if sync is None or sync is False:
        return ()
    if sync is True:
        named = [notebooks_folder()]
    elif isinstance(sync, str | os.PathLike):
        named = os.fspath(sync).split(",")
    else:
        named = [os.fspath(each) for each in sync]
    folders = tuple(dict.fromkeys(os.path.abspath(os.path.expanduser(each)) for each in named))
    for folder in folders:
        if not os.path.isdir(folder):
            raise OptionError(f"sync={sync!r}: {folder} is not a folder. Name the folders that contain your modules.")
    SentFolders(folders).read()
    return folders


def notebooks_folder() -> str:
    """Return the folder of this script, or the current folder in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    ipython = sys.modules.get("IPython")
    if file is None or (ipython is not None and ipython.get_ipython() is not None):
        return os.getcwd()
    return os.path.dirname(os.path.abspath(str(file)))


def _files_in(top: str) -> Iterator[str]:
    """Yield the paths, within a folder, of the files that are sent."""
    visited, count = set[str](), 0
    packages: set[str] = set()
    for folder, folders, names in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited or real == _OWN or (_ENVIRONMENT in names and folder != top):
            folders.clear()
            continue
        visited.add(real)
        count += len(folders) + len(names)
        if count > _MOST_VISITED:
            raise OptionError(
                f"{top} has more than {_MOST_VISITED:,} files, and --sync searches all of them before each cell. "
                + _NAME_OTHERS
            )
        folders[:] = [each for each in folders if each[0] != "." and each not in _LEFT_OUT]
        if folder != top and (os.path.dirname(folder) in packages or "__init__.py" in names):
            packages.add(folder)
        for name in names:
            if name[0] != "." and (name.endswith(".py") or (folder in packages and not name.endswith(_COMPILED))):
                yield os.path.join(folder, name)[len(os.path.join(top, "")) :]


_NAME_OTHERS = "Name the folders of your modules instead: %distnb start --sync src,lib, or sync=['src', 'lib']."


def _too_much(folder: str, files: Mapping[str, bytes]) -> OptionError:
    sizes = sorted(((len(content), place) for place, content in files.items()), reverse=True)
    largest = ", ".join(f"{place.partition('/')[2]} ({size / 1e6:.1f} MB)" for size, place in sizes[:3])
    return OptionError(
        f"--sync sends at most {_MOST_FILES:,} files and {_MOST_NBYTES >> 20} MB: Python code, and the other files of "
        f"packages. {folder} has more. The largest so far: {largest}. Keep data where all machines can read it. "
        + _NAME_OTHERS
    )
