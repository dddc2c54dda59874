"""The comparison of the packages that programs import with those of other machines."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from distnb.cluster.package_versions import differs, package_of, version_here
from distnb.notebook.namespace.module_watch import library_folders
from distnb.views.wording import ranges

__all__ = ["PackageComparison", "local_file"]


class PackageComparison:
    """The comparison of the notebook's packages with those of other machines. It reports each difference once.

    Args:
        hosts: The machine of each engine.
        packages: The versions of the packages on each machine. Machines without an entry are not compared.
        announce: Shows a notice to the user.
        folders: The folders that are sent to the machines. Packages in them are not compared.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        packages: Mapping[str, Mapping[str, str]],
        announce: Callable[[str], None],
        folders: Sequence[str] = (),
    ) -> None:
        self._hosts = hosts
        self._packages = packages
        self._announce = announce
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._compared: set[str] = set()

    def compare(self, modules: Collection[str]) -> None:
        """Compare the packages that have these modules. A notice reports each package that differs once."""
        new = {name.partition(".")[0] for name in modules} - self._compared
        self._compared |= new
        unlike = []
        for package in sorted({found for name in new if (found := package_of(name)) and not self._is_sent(name)}):
            unlike += self._differences(package)
        if unlike:
            self._report(unlike)

    def _is_sent(self, module: str) -> bool:
        return bool(self._folders) and (local_file(module) or "").startswith(self._folders)

    def _differences(self, package: str) -> list[tuple[str, str]]:
        """Return the package and a text for each group of engines whose machine has another version, or none."""
        engines: dict[str, list[int]] = {}
        for engine, host in self._hosts.items():
            if host in self._packages and differs(package, self._packages[host]):
                engines.setdefault(host, []).append(engine)
        found = []
        for host, theirs in engines.items():
            version = self._packages[host].get(package)
            who = f"engine{'s' if len(theirs) > 1 else ''} {', '.join(ranges(theirs))} on {host}"
            verb = "have" if len(theirs) > 1 else "has"
            which = f"{package} {version}" if version else f"no {package}"
            found.append((package, f"{who} {verb} {which}, this notebook has {version_here(package)}"))
        return found

    def _report(self, unlike: Sequence[tuple[str, str]]) -> None:
        wanted = {package: f"{package}=={(version_here(package) or '').partition('+')[0]}" for package, _ in unlike}
        local = [name for name in wanted if local_file(name.replace("-", "_"))]
        text = f"distnb: {'; '.join(text for _, text in unlike)}."
        if to_install := " ".join(each for name, each in wanted.items() if name not in local):
            text += f" To install the same there: pip install {to_install}."
        if local:
            text += f" `{'`, `'.join(local)}` is local: %distnb start --sync FOLDER sends the folder that contains it."
        if "torch" in wanted:
            text += " Tensors and collectives may fail between versions of torch."
        self._announce(text)


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
    folders = library_folders()
    return None if path.startswith(folders) or os.path.realpath(path).startswith(folders) else os.path.abspath(path)
