"""Libraries that forked processes need not load: their zygote has loaded them, and hides them until they are imported.

A program sees no difference but the time: `sys.modules` contains a library from its import on, and an import finds the
version that comes first on `sys.path`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_LIBRARIES = ("keras", "torchmetrics", "sklearn.datasets")


def hide() -> None:
    """Load the libraries, with all that they import, and hide them. With GPUs do nothing: Keras looks for them."""
    if os.path.exists("/dev/nvidiactl"):
        return
    before = set(sys.modules)
    for name in _LIBRARIES:
        importlib.import_module(name)
    visible = {name.partition(".")[0] for name in before} | sys.stdlib_module_names
    new = {name for name in sys.modules if name.partition(".")[0] not in visible}
    found = {name for name in new if "." not in name and getattr(sys.modules[name], "__spec__", None) is not None}
    hidden: dict[str, dict[str, ModuleType]] = {package: {} for package in found}
    for name in new:
        if (package := name.partition(".")[0]) in hidden:
            hidden[package][name] = sys.modules.pop(name)
    sys.meta_path.insert(0, _Finder(hidden))


def forget_chosen_otherwise(environment: dict[str, str]) -> None:
    """Forget the hidden Keras if this process's environment has other settings for it than the zygote's."""

    def settings(variables: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name.startswith("KERAS_")}

    if settings(environment) != settings(dict(os.environ)):
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                finder.hidden.pop("keras", None)


class _Finder:
    """A finder and loader of the hidden modules, for `sys.meta_path`: a package appears with all its modules."""

    def __init__(self, hidden: dict[str, dict[str, ModuleType]]) -> None:
        self.hidden = hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hidden:
            return None
        spec, known = PathFinder.find_spec(name), self.hidden[name][name].__spec__
        if spec is None or known is None or spec.origin != known.origin:
            return None
        spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.hidden[spec.name][spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__  # type: ignore[assignment]
        sys.modules.update(self.hidden.pop(module.__name__))
        if module.__name__ == "matplotlib" and "MPLBACKEND" in os.environ:
            module.rcParams["backend"] = os.environ["MPLBACKEND"]
