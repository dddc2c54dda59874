"""Modules that engines must import beside those that are named, and local ones that the notebook reloaded."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
import types
from collections.abc import Collection, Iterable

__all__ = ["ModuleWatch"]


@functools.cache
def _library_folders() -> tuple[str, ...]:
    folders = {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        site.getusersitepackages(),
        sys.base_prefix + "/lib",
    }
    return tuple(folder for folder in folders if folder)


class ModuleWatch:
    """Sees when the notebook reloads a local module, by `importlib.reload` or %autoreload."""

    def __init__(self) -> None:
        self._specs: dict[str, object] = {}
        self._reloads: dict[str, int] = {}
        self._local: dict[str, bool] = {}

    def wanted(self, modules: Iterable[types.ModuleType], attributes: Collection[str]) -> dict[str, int]:
        """What the engines should have imported, and how often each was reloaded.

        Args:
            modules: Modules that a program reads by name.
            attributes: Names of attributes in its code: `a.b` needs the submodule `a.b` if there is one.
        """
        wanted = {name: 0 for module in modules for name in self._submodules(module.__name__, attributes)}
        for name, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType) and self._is_local(name, module):
                reloads = self._count(name, module)
                if reloads or name in wanted:
                    wanted[name] = reloads
        return wanted

    def _submodules(self, name: str, attributes: Collection[str]) -> list[str]:
        prefix = name + "."
        found = [module for module in sys.modules if module.startswith(prefix)]
        return [module for module in found if all(part in attributes for part in module[len(prefix) :].split("."))]

    def _count(self, name: str, module: types.ModuleType) -> int:
        spec = module.__spec__
        # A reload makes a new spec.
        if self._specs.setdefault(name, spec) is not spec:
            self._specs[name] = spec
            self._reloads[name] = self._reloads.get(name, 0) + 1
        return self._reloads.get(name, 0)

    def _is_local(self, name: str, module: types.ModuleType) -> bool:
        known = self._local.get(name)
        if known is None:
            file = getattr(module, "__file__", None)
            known = bool(file) and module.__spec__ is not None and not str(file).startswith(_library_folders())
            self._local[name] = known
        return known
