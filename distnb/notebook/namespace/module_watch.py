"""Modules that engines must import beside those that are named, and local ones that the notebook reloaded."""

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
"""Tell which version of its file %autoreload has brought into a module, by its name; None where it knows of none."""

State = tuple[object, object]


def state_of(module: types.ModuleType) -> State:
    """What tells whether a module was reloaded: its spec, of which a reload makes a new one, and its file's version."""
    version = next((found for ask in versions if (found := ask(module.__name__)) is not None), None)
    return getattr(module, "__spec__", None), version


def reloaded(before: State, now: State) -> Reloads | None:
    """How a module was reloaded between two states; None if it was not."""
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
    """Folders that Python was started with beside its own: those of PYTHONPATH and of .pth files."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    for site_folder in (*site.getsitepackages(), site.getusersitepackages()):
        for file in glob.glob(os.path.join(glob.escape(site_folder), "*.pth")):
            with open(file, encoding="utf-8", errors="replace") as lines:
                folders += [found for line in lines if os.path.isdir(found := os.path.join(site_folder, line.strip()))]
    return tuple({os.path.join(os.path.realpath(folder), "") for folder in folders})


def _is_local_file(file: str) -> bool:
    """Whether a module's file is the user's own: in the working directory, or on a path that was added to sys.path."""
    if file.startswith(_library_folders()):
        return False
    real = os.path.realpath(file)
    if real.startswith(os.path.join(os.path.realpath(os.curdir), "")):
        return True
    added = tuple(os.path.join(os.path.realpath(folder), "") for folder in sys.path if folder)
    return not real.startswith(_given_folders()) and real.startswith(added)


class ModuleWatch:
    """Sees when the notebook reloads a local module, by `importlib.reload` or %autoreload."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._reloads: dict[str, Reloads] = {}
        self._local: dict[str, bool] = {}
        self._newest = 0, ""
        self._names: list[str] = []
        # Of packages that were asked for, the modules within, by the first part of their names there.
        self._within: dict[str, dict[str, list[str]]] = {}

    def wanted(self, modules: Iterable[types.ModuleType], attributes: Collection[str]) -> dict[str, Reloads]:
        """What the engines should have imported for a program that reads `modules`, and how often each was reloaded.

        Of its code's `attributes`, `a.b` needs the submodule `a.b` if there is one.
        """
        wanted = {name: Reloads() for module in modules for name in self._submodules(module.__name__, attributes)}
        for module in self.local():
            name = module.__name__
            reloads = self._count(name, module)
            if reloads.times or name in wanted:
                wanted[name] = reloads
        return wanted

    def local(self) -> list[types.ModuleType]:
        """The local modules that are loaded."""
        self._see_new()
        found = [sys.modules.get(name) for name in self._names]
        return [each for each in found if isinstance(each, types.ModuleType)]

    def _see_new(self) -> None:
        """Go through the loaded modules, of which there are thousands, when there is a new one: the last then."""
        newest = len(sys.modules), next(reversed(sys.modules), "")
        if newest != self._newest:
            self._newest = newest
            self._within.clear()
            loaded = list(sys.modules.items())
            self._names = [
                name for name, each in loaded if isinstance(each, types.ModuleType) and self._is_local(name, each)
            ]

    def _submodules(self, name: str, attributes: Collection[str]) -> list[str]:
        self._see_new()
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
        # A version that is not known (a reload that failed) says nothing new.
        self._states[name] = now[0], before[1] if now[1] is None else now[1]
        return known

    def _is_local(self, name: str, module: types.ModuleType) -> bool:
        """Whether it is the user's own. distnb's modules may be in no library's folder, and never change."""
        known = self._local.get(name)
        if known is None:
            file = getattr(module, "__file__", None) if getattr(module, "__spec__", None) is not None else None
            ours = name.partition(".")[0] == "distnb"
            known = self._local[name] = bool(file) and not ours and _is_local_file(str(file))
        return known
