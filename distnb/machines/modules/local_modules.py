"""The notebook's side: the files of its local modules.

A module is *local* if it belongs neither to Python nor to an installed package. Editable installations are local. The
files are sent in *units*, which an engine imports by the same names:

    mypkg          every file below the package's folder: submodules, and data for `importlib.resources`
    helpers        the one file helpers.py
    space.tools    a package or a module in a namespace package `space`, without the rest of `space`

Engines get the files before the program that needs them. Nothing is fetched on demand, when an import fails: the
workers of a DataLoader have no connection to the notebook, and an engine that has another module of the same name
would import that one. So the needed units are found in advance. They contain every local module that the notebook has
loaded, the modules that the program's text and functions import, and the modules that the files of these modules
import. A module that only `importlib.import_module` names is missing until the notebook has imported it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import site
import stat
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import xxhash

from distnb.objects.modes.environment import current_cell

__all__ = ["LocalModules", "ModuleFile", "local_file", "local_path"]

_LARGE_NBYTES = 16 << 20
_MOST_DATA_NBYTES = 64 << 20  # of the files of a package that are not Python code
_MOST_FILES = 10_000
_RECENT_NS = 2_000_000_000  # the coarsest clock of a file system
_COMPILED = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_LEFT_OUT = "__pycache__"
_ENVIRONMENT = "pyvenv.cfg"  # the file that marks a virtual environment, which may be within a package

# An import statement, also within a function. A package of a thousand files is searched in a tenth of a second; parsing
# would take several. A match in a docstring does no harm, since only modules that exist are sent.
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:"
    r"from[ \t]+(?P<source>[\w.]+)[ \t]+import[ \t]*(?P<names>\([^)]*\)|[^\n;#]*)"
    r"|import[ \t]+(?P<modules>[\w. \t,]+))",
    re.MULTILINE,
)
_NAME = re.compile(r"[^\W\d]\w*")


class ModuleFile(NamedTuple):
    """A file of a local module.

    Attributes:
        path: The file's path on the notebook's machine, for tracebacks.
        content: The bytes in it; None if the notebook's file no longer exists.
    """

    path: str
    content: bytes | None


@dataclass(frozen=True)
class _File:
    """A file as it was last read.

    Attributes:
        state: The facts that a change of the file changes; None if it was too recent to rely on them.
    """

    path: str
    place: str
    state: tuple[int, ...] | None
    digest: bytes
    content: bytes

    @cached_property
    def imports(self) -> frozenset[str]:
        """The modules that the file imports, also as `package.name` for names that it imports from a package."""
        return frozenset(_imports(self.content, self.place))


class _CannotBeSent(Exception):
    """A unit that consists of more than Python code and data. The text says what was found."""


class LocalModules:
    """The local modules that programs have needed so far, and their files. Any thread may use it.

    Args:
        announce: Shows a notice to the user.

    Attributes:
        imports: The modules that the needed modules import.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._lock = threading.RLock()
        self._units: dict[str, str] = {}  # the path of each unit by its name
        self._refused: dict[str, str] = {}  # the reason by unit
        self._others: set[str] = {"__main__", "__mp_main__", "distnb"}  # modules that are not local
        self._is_local: dict[str, bool] = {}
        self._without_data: set[str] = set()
        self._needed: set[str] = set()
        self._moment: object = None
        # The digest of each file by its place, which is its path relative to an entry of `sys.path`; and the files.
        # Both are replaced together when a file has changed.
        self._current: tuple[Mapping[str, bytes], Mapping[str, _File]] = ({}, {})
        self.imports: frozenset[str] = frozenset()

    def need(self, names: Collection[str]) -> None:
        """Find the files for a program that imports these modules. Files are read again once in each cell.

        Args:
            names: Names of modules. Modules that are not local are ignored.
        """
        with self._lock:
            moment = current_cell(), len(sys.modules), next(reversed(sys.modules), "")
            if moment != self._moment or not self._needed.issuperset(names):
                self._moment = moment
                self._needed.update(names)
                self._update()

    def lacking(self, known: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], dict[str, ModuleFile]]:
        """Return the files that a receiver lacks.

        Args:
            known: The digests that the last call for this receiver returned; {} at first.

        Returns:
            The current digests, and the files by their places.
        """
        digests, files = self._current
        if known is digests:
            return known, {}
        changed = {
            place: ModuleFile(files[place].path, files[place].content)
            for place, digest in digests.items()
            if known.get(place) != digest
        }
        return digests, changed | {place: ModuleFile("", None) for place in known if place not in digests}

    def sends(self, name: str) -> bool:
        """Return whether a module is in one of the units."""
        return any(prefix in self._units for prefix in _prefixes(name))

    def refusal(self, name: str) -> str:
        """Return why a local module is not sent, with the cure; "" if there is no reason."""
        return next((self._refused[prefix] for prefix in _prefixes(name) if prefix in self._refused), "")

    # -- units -------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Read the units of the needed modules, and of all modules that these import, directly or not."""
        files: dict[str, _File] = {}
        reached: set[str] = set()
        read: set[str] = set()
        imports = frozenset(self._follow(self._needed, reached, read, files))
        self._follow(self._loaded(), reached, read, files)
        self.imports = imports if imports != self.imports else self.imports
        digests = {place: file.digest for place, file in sorted(files.items())}
        before = self._current[0]
        if digests != before:
            self._current = digests, files
            self._announce_size([place for place, digest in digests.items() if before.get(place) != digest])

    def _follow(self, names: Iterable[str], reached: set[str], read: set[str], files: dict[str, _File]) -> set[str]:
        """Read the units of modules, and of the modules that they import. Return the imported modules.

        Args:
            reached, read: The modules that were handled, and the units that were read so far. They are added to.
            files: Receives the files of the units.
        """
        imports: set[str] = set()
        waiting = [*names]
        while waiting:
            for module in _prefixes(waiting.pop()):  # importing a module imports the packages that contain it
                if module in reached:
                    continue
                reached.add(module)
                unit = self._unit_of(module)
                if unit is not None and unit not in read:
                    if not os.path.exists(self._units[unit]):
                        del self._units[unit]
                        unit = self._unit_of(module)
                    if unit is not None:
                        read.add(unit)
                        files |= self._read(unit)
                place = module.replace(".", "/")
                file = files.get(f"{place}/__init__.py") or files.get(f"{place}.py")
                if file is not None:
                    imports |= file.imports
                    waiting += file.imports
        return imports

    def _loaded(self) -> Iterator[str]:
        """Yield the names of the local modules that this process has loaded."""
        for name, module in sys.modules.copy().items():  # at once: another thread may import
            known = self._is_local.get(name)
            if known is None and isinstance(module, types.ModuleType):
                spec = getattr(module, "__spec__", None)
                # A module under a second name is found under its own.
                known = getattr(spec, "name", None) == name and local_path(spec) is not None
                self._is_local[name] = known
            if known:
                yield name

    def _unit_of(self, name: str) -> str | None:
        """Return the unit that contains a module; None if the module is not local, or is not sent."""
        for prefix in _prefixes(name):
            if prefix in self._others or prefix in self._refused:
                return None
            if prefix in self._units:
                return prefix
        found = _outermost(name)
        if found is None:
            return None  # it may be created later
        unit, spec = found
        file = local_path(spec)
        if file is None:
            self._others.add(unit)
            return None
        if not file.endswith(".py") or not os.path.isfile(file):
            self._refuse(unit, f"it consists of {file}")
            return None
        self._units[unit] = file if spec.submodule_search_locations is None else os.path.dirname(file)
        return unit

    def _refuse(self, unit: str, why: str) -> None:
        self._units.pop(unit, None)
        self._refused[unit] = (
            f"The local module `{unit}` is not sent to the engines, because {why}. Only Python code and data are sent. "
            "Install it on the engines' machines."
        )
        self._announce(f"distnb: {self._refused[unit]}")

    # -- files -------------------------------------------------------------------------------------------------------

    def _read(self, unit: str) -> dict[str, _File]:
        """Read the files of a unit that have changed, and return all by place."""
        path, place = self._units[unit], unit.replace(".", "/")
        try:
            found = self._files_of(unit, path) if os.path.isdir(path) else {"": path}
        except _CannotBeSent as error:
            self._refuse(unit, str(error))
            return {}
        files = {}
        for within, file_path in found.items():
            full = f"{place}/{within}" if within else f"{place}.py"
            file = _read_file(file_path, full, self._current[1].get(full))
            if file is not None:
                files[full] = file
        return files

    def _files_of(self, unit: str, top: str) -> dict[str, str]:
        """Return the paths of a package's files, by their paths within the package."""
        with_data = unit not in self._without_data
        found, nbytes, visited = {}, 0, set[str]()
        for folder, folders, names in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            if real in visited or _ENVIRONMENT in names:
                folders.clear()
                continue
            visited.add(real)
            folders[:] = [each for each in folders if each[0] != "." and each != _LEFT_OUT]
            if not with_data:
                folders[:] = [each for each in folders if os.path.isfile(os.path.join(folder, each, "__init__.py"))]
            for name in names:
                path = os.path.join(folder, name)
                within = path[len(top) + 1 :]
                if name.endswith(_COMPILED):
                    raise _CannotBeSent(f"{within} in it is compiled")
                is_code = name.endswith(".py")
                if name[0] == "." or not (is_code or with_data):
                    continue
                found[within] = path
                nbytes += 0 if is_code else _size(path)
                if with_data and (nbytes > _MOST_DATA_NBYTES or len(found) > _MOST_FILES):
                    self._without_data.add(unit)
                    self._announce(
                        f"distnb: only the Python code of the local package `{unit}` is sent to the engines, because "
                        f"it has more than {_MOST_DATA_NBYTES >> 20} MB of data or {_MOST_FILES:,} files. Keep the "
                        "data where all machines can read it."
                    )
                    return self._files_of(unit, top)
        return found

    def _announce_size(self, places: Iterable[str]) -> None:
        sizes: dict[str, int] = {}
        for place in places:
            unit = place.partition("/")[0].removesuffix(".py")
            sizes[unit] = sizes.get(unit, 0) + len(self._current[1][place].content)
        total = sum(sizes.values())
        if total > _LARGE_NBYTES:
            largest = ", ".join(f"`{unit}`" for unit in sorted(sizes, key=lambda unit: -sizes[unit])[:3])
            self._announce(f"distnb: sending {total / 1e6:,.0f} MB of local modules to each engine: {largest}")


def local_path(spec: Any) -> str | None:
    """Return the path of a local module's file from its spec; None for other modules."""
    path = getattr(spec, "origin", None)
    if not isinstance(path, str) or not getattr(spec, "has_location", False):
        return None
    if re.search(r"[/\\](site|dist)-packages[/\\]", path):
        return None
    folders = _library_folders()
    return None if path.startswith(folders) or os.path.realpath(path).startswith(folders) else os.path.abspath(path)


def local_file(name: str) -> str | None:
    """Return the path of the local module, or of the local package, that contains a module; None if it is not local."""
    found = _outermost(name)
    return None if found is None else local_path(found[1])


def _prefixes(name: str) -> list[str]:
    """Return a module's name and those of the packages that contain it, the outermost first."""
    return [*(name[: found.start()] for found in re.finditer(r"\.", name)), name]


def _outermost(name: str) -> tuple[str, Any] | None:
    """Return the outermost module or package with a file that contains a module, with its spec; None if there is none.

    Namespace packages have no file.
    """
    folders = None
    for prefix in _prefixes(name):
        spec = _spec(prefix, folders)
        if spec is None:
            return None
        if getattr(spec, "origin", None) is not None or getattr(spec, "submodule_search_locations", None) is None:
            return prefix, spec
        folders = list(spec.submodule_search_locations)
    return None


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.join(each, "") for folder in folders for each in {folder, os.path.realpath(folder)})


def _spec(name: str, folders: list[str] | None) -> Any:
    """Return the spec of a module without importing it, or None.

    Args:
        folders: The folders of the namespace package that contains it; None for a module of its own.
    """
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None and (local_path(loaded) is None or os.path.exists(loaded.origin)):
        return loaded
    try:
        if folders is not None or loaded is not None:
            return importlib.machinery.PathFinder.find_spec(name, folders)
        return importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001  (finders of other libraries)
        return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_file(path: str, place: str, before: _File | None) -> _File | None:
    """Return a file in its current state, or None if it cannot be read."""
    try:
        status = os.stat(path)
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if before is not None and before.path == path and before.state == state:
            return before
        if not stat.S_ISREG(status.st_mode):
            return None
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    # A second change within a tick of the file system's clock would leave the state unchanged.
    is_recent = time.time_ns() - status.st_mtime_ns < _RECENT_NS
    digest = xxhash.xxh3_128_digest(content)
    return _File(path=path, place=place, state=None if is_recent else state, digest=digest, content=content)


def _imports(content: bytes, place: str) -> Iterator[str]:
    """Yield the modules that a file's text imports."""
    try:
        text = importlib.util.decode_source(content).replace("\\\n", " ")
    except (SyntaxError, UnicodeDecodeError):
        return  # importing the file raises it, too
    package = place.rpartition("/")[0].replace("/", ".")
    for found in _IMPORT.finditer(text):
        for module in (found["modules"] or "").split(","):
            if words := module.split():
                yield words[0].strip(".")
        source = found["source"]
        if source is None:
            continue
        try:
            source = importlib.util.resolve_name(source, package)
        except ImportError:
            continue  # beyond the outermost package
        yield source
        names = re.sub(r"#.*", "", found["names"])
        yield from (f"{source}.{words[0]}" for part in names.strip("()").split(",") if (words := _NAME.findall(part)))
