"""tqdm's notebook bars are widgets, whose comms would end on the engine: here they are text bars."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType

__all__ = ["install"]

_WIDGET_BARS = ("tqdm.notebook", "tqdm.autonotebook")


class _TextBars(MetaPathFinder, Loader):
    """Answers imports of tqdm's widget modules with what its plain module has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WIDGET_BARS or PathFinder.find_spec(fullname, path) is None:
            return None
        return spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        plain = importlib.import_module("tqdm.std")
        module.__dict__.update(
            tqdm=plain.tqdm,
            tqdm_notebook=plain.tqdm,
            trange=plain.trange,
            tnrange=plain.trange,
            __all__=["tqdm", "trange"],
        )


def install() -> None:
    """From now on `from tqdm.notebook import tqdm` and `tqdm.auto` give text bars in this process."""
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())
