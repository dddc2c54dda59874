"""The notebook's local modules: those that belong neither to Python nor to an installed package."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import site
import sysconfig
from functools import cache
from typing import Any

__all__ = ["local_file"]


def local_file(name: str) -> str | None:
    """Return the path of the local module, or of the local package, that contains a module; None if it is not local.

    Editable installations are local.
    """
    folders: list[str] | None = None
    for end in (*(found.start() for found in re.finditer(r"\.", name)), len(name)):
        spec = _spec(name[:end], folders)
        if spec is None:
            return None
        if spec.origin is not None or spec.submodule_search_locations is None:
            return _local_path(spec)
        folders = list(spec.submodule_search_locations)  # a namespace package has no file
    return None


def _spec(name: str, folders: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module without importing it, or None.

    Args:
        folders: The folders of the namespace package that contains it; None for a module of its own.
    """
    try:
        if folders is not None:
            return importlib.machinery.PathFinder.find_spec(name, folders)
        return importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001  (finders of other libraries)
        return None


def _local_path(spec: Any) -> str | None:
    path = spec.origin
    if not isinstance(path, str) or not spec.has_location or re.search(r"[/\\](site|dist)-packages[/\\]", path):
        return None
    folders = _library_folders()
    return None if path.startswith(folders) or os.path.realpath(path).startswith(folders) else os.path.abspath(path)


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.join(each, "") for folder in folders for each in {folder, os.path.realpath(folder)})
