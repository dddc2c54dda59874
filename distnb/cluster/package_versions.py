"""The versions of installed packages, here and on other machines."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from functools import cache

__all__ = ["differs", "installed_packages", "package_of", "version_here"]


def installed_packages() -> dict[str, str]:
    """Return the version of each package that is installed here, by its normalised name."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        try:
            name, version = each.metadata["Name"], each.version
        except Exception:  # noqa: BLE001  (an interrupted installation leaves folders without the file)
            continue
        if name and version:
            found.setdefault(_normalised(name), version)  # the first one on `sys.path` is imported
    return found


@cache
def package_of(module: str) -> str | None:
    """Return the normalised name of the package that has a top-level module; None for Python's own and for others."""
    if module in sys.stdlib_module_names:
        return None
    if version_here(module) is not None:  # most packages have the names of their modules, and this is 100 times faster
        return _normalised(module)
    providers = set(_packages_by_module().get(module, ()))
    return _normalised(providers.pop()) if len(providers) == 1 else None


@cache  # reading the metadata takes milliseconds, and there may be hundreds of machines to compare with
def version_here(package: str) -> str | None:
    """Return the version of a package that is installed here, or None."""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def differs(package: str, there: Mapping[str, str]) -> bool:
    """Return whether a package that is installed here is missing elsewhere, or has another version there.

    Builds of one version, such as torch 2.11.0+cpu and 2.11.0+cu128, are equal.
    """
    here, other = version_here(package), there.get(package)
    return here is not None and (other is None or here.partition("+")[0] != other.partition("+")[0])


@cache
def _packages_by_module() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
