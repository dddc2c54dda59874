"""Imports and reloads of the notebook's modules on an engine."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from distnb.wire.exchange import Reloads

__all__ = ["ModuleReloader"]


class ModuleReloader:
    """The importer of local modules, which repeats the notebook's imports and reloads."""

    def __init__(self) -> None:
        self._followed: dict[str, int] = {}
        self._before: dict[Any, Any] = {}  # autoreload's record of objects to change in place
        self._patcher: Any = None  # autoreload's reloader that only changes definitions whose text has changed

    def follow(self, modules: Mapping[str, Reloads]) -> None:
        """Import modules, or reload those that the notebook has reloaded, by name."""
        for name, reloads in modules.items():
            known = sys.modules.get(name)
            with contextlib.suppress(ImportError):  # raised again where the module is used
                if known is None:
                    importlib.invalidate_caches()
                    importlib.import_module(name)
                elif reloads.times > self._followed.get(name, 0):
                    importlib.invalidate_caches()
                    self._reload(known, reloads)
            self._followed[name] = max(reloads.times, self._followed.get(name, 0))

    def _reload(self, module: Any, reloads: Reloads) -> None:
        if not reloads.in_place:
            importlib.reload(module)
            return
        from IPython.extensions import autoreload

        if reloads.text_before:  # the notebook's IPython has this reloader, too
            from IPython.extensions.deduperreload.deduperreload import DeduperReloader

            if self._patcher is None:
                self._patcher = DeduperReloader()
            self._patcher.source_by_modname.setdefault(module.__name__, reloads.text_before)
            if self._patcher.maybe_reload_module(module):
                return
        autoreload.superreload(module, old_objects=self._before)
