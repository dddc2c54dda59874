"""The modules that engines must import in addition to the named ones, and local modules that the notebook reloaded."""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import os
import site
import sys
import sysconfig
import tokenize
import types
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from distnb.wire.exchange import Reloads

__all__ = ["FileVersion", "ModuleWatch", "library_folders", "versions"]


class FileVersion(NamedTuple):
    """The version of a module's file that %autoreload has loaded.

    Attributes:
        time: The file's modification time; None if it is unknown, as before %autoreload has seen the module, or after a
            reload has failed.
        patches: Whether %autoreload changes only the definitions whose text has changed, so that classes stay the same
            objects.
    """

    time: float | None
    patches: bool = False


_libraries = (0, "")  # the number of modules, and the name of the last one, when `note_libraries` was called


def note_libraries() -> None:
    """Note that none of the loaded modules is the user's. To look at each of them would copy its shared pages."""
    global _libraries
    _libraries = len(sys.modules), next(reversed(sys.modules))


versions: list[Callable[[str], FileVersion | None]] = []
"""Functions that return the version of a module's file, by the module's name; None if %autoreload is not loaded."""


class _State(NamedTuple):
    """The state of a module, which a reload changes.

    Attributes:
        spec: The module's spec. `importlib.reload` replaces it.
        time: The modification time of the loaded file. %autoreload changes modules in place, so nothing else shows it.
    """

    spec: object
    time: float | None


def _version_of(name: str) -> FileVersion | None:
    return next((found for ask in versions if (found := ask(name)) is not None), None)


def _text_of(module: types.ModuleType) -> str:
    """Return the text of a module's file; "" if it cannot be read."""
    with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(str(module.__file__)) as file:
        return file.read()
    return ""


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Return the folders of Python and of its installed packages."""
    folders = {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        site.getusersitepackages(),
        sys.base_prefix + "/lib",
    }
    return tuple(os.path.join(folder, "") for folder in folders if folder)


@functools.cache
def _given_folders() -> tuple[str, ...]:
    """Return the folders that Python was started with in addition to its own, from PYTHONPATH and .pth files."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    for site_folder in (*site.getsitepackages(), site.getusersitepackages()):
        for file in glob.glob(os.path.join(glob.escape(site_folder), "*.pth")):
            with open(file, encoding="utf-8", errors="replace") as lines:
                folders += [found for line in lines if os.path.isdir(found := os.path.join(site_folder, line.strip()))]
    return tuple({os.path.join(os.path.realpath(folder), "") for folder in folders})


def _is_local_file(file: str) -> bool:
    """Return whether a module's file is the user's: in the working directory, or on a path added to sys.path."""
    if file.startswith(library_folders()):
        return False
    real = os.path.realpath(file)
    if real.startswith(os.path.join(os.path.realpath(os.curdir), "")):
        return True
    added = tuple(os.path.join(os.path.realpath(folder), "") for folder in sys.path if folder)
    return not real.startswith(_given_folders()) and real.startswith(added)


class ModuleWatch:
    """The detector of reloads of local modules in the notebook, by `importlib.reload` or %autoreload."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._texts: dict[str, str] = {}  # the modules' files as they were when the modules were found
        self._reloads: dict[str, Reloads] = {}
        self._local: dict[str, bool] = {}
        self._newest = _libraries
        self._names: list[str] = []
        # The loaded modules of each package, by the first part of their names within it. Example: {"torch": {"nn":
        # ["torch.nn", "torch.nn.functional"]}}.
        self._within: dict[str, dict[str, list[str]]] = {}

    def wanted(self, modules: Iterable[types.ModuleType], attributes: Collection[str]) -> dict[str, Reloads]:
        """Return the modules that a program needs on the engines, each with its reloads.

        Args:
            modules: The modules that the program reads.
            attributes: The attributes that its code reads: `a.b` needs the submodule `a.b` if there is one.
        """
        wanted = {name: Reloads() for module in modules for name in self._submodules(module.__name__, attributes)}
        for module in self.local():
            name = module.__name__
            reloads = self._count(name, module)
            if reloads.times or name in wanted:
                wanted[name] = reloads
        return wanted

    def local(self) -> list[types.ModuleType]:
        """Return the local modules that are loaded."""
        self.update()
        found = [sys.modules.get(name) for name in self._names]
        return [each for each in found if isinstance(each, types.ModuleType)]

    def update(self) -> None:
        """Find the local modules among those that were loaded since the last call: the last ones in `sys.modules`.

        Call this when a program has ended, because a module that it imported may be edited before the next one.
        """
        newest = len(sys.modules), next(reversed(sys.modules), "")
        if newest == self._newest:
            return
        count, last = self._newest
        self._newest = newest
        self._within.clear()
        # In one call, during which no other thread can import.
        latest = [*itertools.islice(reversed(sys.modules), max(0, newest[0] - count) + 1)][::-1]
        if newest[0] < count or latest[0] != last:  # a module was removed
            latest, self._names = ["", *sys.modules], []
        for name in latest[1:]:
            module = sys.modules.get(name)
            # multiprocessing keeps the main module under a second name.
            if isinstance(module, types.ModuleType) and module.__name__ == name and self._is_local(name, module):
                self._names.append(name)
        for name in self._names:
            if name not in self._states:
                self._note(name, sys.modules[name])

    def _note(self, name: str, module: types.ModuleType) -> None:
        """Note the state of a module that has been loaded."""
        version = _version_of(name)
        time = None if version is None else version.time
        if version is not None and time is None:
            with contextlib.suppress(OSError):
                time = os.stat(str(module.__file__)).st_mtime
        self._states[name] = _State(getattr(module, "__spec__", None), time)
        self._texts[name] = _text_of(module)

    def _submodules(self, name: str, attributes: Collection[str]) -> list[str]:
        self.update()
        prefix = name + "."
        if name not in self._within:
            within = self._within[name] = {}
            for module in list(sys.modules):
                if module.startswith(prefix):
                    within.setdefault(module[len(prefix) :].partition(".")[0], []).append(module)
        within = self._within[name]
        found = [module for first in within.keys() & attributes for module in within[first]]
        return [module for module in found if all(part in attributes for part in module[len(prefix) :].split("."))]

    def _count(self, name: str, module: types.ModuleType) -> Reloads:
        """Return the reloads of a module so far."""
        before, version = self._states[name], _version_of(name)
        time = version.time if version is not None and version.time is not None else before.time
        now = self._states[name] = _State(getattr(module, "__spec__", None), time)
        known = self._reloads.get(name, Reloads())
        in_place = before.time is not None and now.time != before.time
        if in_place or now.spec is not before.spec:
            text = self._texts[name] if version is not None and version.patches and in_place else ""
            known = self._reloads[name] = Reloads(known.times + 1, in_place=in_place, text_before=text)
        return known

    def _is_local(self, name: str, module: types.ModuleType) -> bool:
        """Return whether a module is the user's. distnb's own may be outside library folders, but never change."""
        known = self._local.get(name)
        if known is None:
            file = getattr(module, "__file__", None) if getattr(module, "__spec__", None) is not None else None
            ours = name.partition(".")[0] == "distnb"
            known = self._local[name] = bool(file) and not ours and _is_local_file(str(file))
        return known
