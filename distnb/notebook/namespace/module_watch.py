"""The modules that engines must import in addition to the named ones, and local modules that the notebook reloaded."""

from __future__ import annotations

import functools
import glob
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable

from distnb.wire.exchange import Reloads

__all__ = ["ModuleWatch", "State", "reloaded", "state_of", "versions"]

versions: list[Callable[[str], object]] = []
"""Functions that return the version of a module's file that %autoreload has loaded, by the module's name, or None."""

State = tuple[object, object]


def state_of(module: types.ModuleType) -> State:
    """Return two facts about a module that a reload changes: its spec, which is replaced, and its file's version."""
    version = next((found for ask in versions if (found := ask(module.__name__)) is not None), None)
    return getattr(module, "__spec__", None), version


def reloaded(before: State, now: State) -> Reloads | None:
    """Return the reload of a module between two states; None if it was not reloaded."""
    if before[1] is not None and now[1] is not None and before[1] != now[1]:
        return Reloads(1, in_place=True)
    return Reloads(1) if before[0] is not now[0] else None


@functools.cache
def _library_folders() -> tuple[str, ...]:
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
    if file.startswith(_library_folders()):
        return False
    real = os.path.realpath(file)
    if real.startswith(os.path.join(os.path.realpath(os.curdir), "")):
        return True
    added = tuple(os.path.join(os.path.realpath(folder), "") for folder in sys.path if folder)
    return not real.startswith(_given_folders()) and real.startswith(added)


class ModuleWatch:
    """The detector of reloads of local modules in the notebook, by `importlib.reload` or %autoreload."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._reloads: dict[str, Reloads] = {}
        self._local: dict[str, bool] = {}
        self._newest = 0, ""
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
        self._update()
        found = [sys.modules.get(name) for name in self._names]
        return [each for each in found if isinstance(each, types.ModuleType)]

    def _update(self) -> None:
        """Find the local modules again if a module was loaded, which is then the last of thousands in `sys.modules`."""
        newest = len(sys.modules), next(reversed(sys.modules), "")
        if newest != self._newest:
            self._newest = newest
            self._within.clear()
            loaded = list(sys.modules.items())
            self._names = [
                name for name, each in loaded if isinstance(each, types.ModuleType) and self._is_local(name, each)
            ]

    def _submodules(self, name: str, attributes: Collection[str]) -> list[str]:
        self._update()
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
        now = state_of(module)
        before = self._states.setdefault(name, now)
        known = self._reloads.get(name, Reloads())
        again = reloaded(before, now)
        if again is not None:
            known = self._reloads[name] = Reloads(known.times + 1, again.in_place)
        # An unknown version (after a failed reload) does not count as a change.
        self._states[name] = now[0], before[1] if now[1] is None else now[1]
        return known

    def _is_local(self, name: str, module: types.ModuleType) -> bool:
        """Return whether a module is the user's. distnb's own may be outside library folders, but never change."""
        known = self._local.get(name)
        if known is None:
            file = getattr(module, "__file__", None) if getattr(module, "__spec__", None) is not None else None
            ours = name.partition(".")[0] == "distnb"
            known = self._local[name] = bool(file) and not ours and _is_local_file(str(file))
        return known
