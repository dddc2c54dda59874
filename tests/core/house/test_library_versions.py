"""Private names of other libraries: only in `distnb/compat`, and checked against the tested versions."""

from __future__ import annotations

import ast
import sys
import tomllib
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from distnb.collectives.group.torch_state import TorchDistributed
from distnb.compat.versions import TESTED, private_names
from distnb.errors import LibraryVersionError, OptionError

ROOT = Path(__file__).parents[3]
# The standard library's, and IPython's hook for errors, which is documented.
ALLOWED = {
    *(
        "_getframe",
        "_current_exceptions",
        "_current_frames",
        "_exit",
        "_fields",
        "_asdict",
        "_replace",
        "_bootstrap",
        "_run_exitfuncs",
        "_slotnames",
    ),
    *("_reconstruct", "_lru_cache_wrapper", "_get_running_loop", "_set_running_loop", "_release_save"),
    *("_acquire_restore", "_actions", "_render_traceback_", "_last_pdb_instance", "_data"),
}


def names_defined(node: ast.AST) -> Iterator[str]:
    """Return the names that a node binds."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
            yield node.attr
        case ast.Constant(value=str()):  # __slots__, keywords
            yield node.value


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_distnb"))


def test_only_compat_uses_private_names_of_other_libraries() -> None:
    own, found, read = set(ALLOWED), [], []
    for file in sorted((ROOT / "distnb").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        checked = not path.startswith(("distnb/compat/", "distnb/keras/keras_internals.py"))
        for node in ast.walk(ast.parse(file.read_text())):
            own.update(names_defined(node))
            match node:
                case ast.Attribute(attr=name) if checked and is_private(name):
                    read.append((f"{path}:{node.lineno}: .{name}", name))
                case ast.ImportFrom(module=str() as module) if checked and not module.startswith(("distnb", "_")):
                    names = [*module.split("."), *(each.name for each in node.names)]
                    found += [f"{path}:{node.lineno}: {module} {each}" for each in names if is_private(each)]
    found += [place for place, name in read if name not in own]
    assert not found, "a private name of another library belongs in its file in distnb/compat"


def test_installed_versions_are_the_tested_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    for library, (first, _) in TESTED.items():
        requirement = next(each for each in asked if each.lower().startswith(f"{library.lower()}>="))
        assert requirement.split(",")[0] == f"{library.lower()}>={first}", requirement


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    library = types.ModuleType("some_library")
    monkeypatch.setitem(sys.modules, "some_library", library)
    monkeypatch.setitem(TESTED, "some_library", ("2.9.1", "2.11"))
    return library


def check(library: types.ModuleType, version: str) -> None:
    library.__version__ = version
    with private_names("some_library"):
        pass


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0", "2.11", "2.11.7+cu130", "2.11.0.post1"])
def test_a_tested_version_is_accepted(installed: types.ModuleType, version: str) -> None:
    with warnings.catch_warnings(action="error"):
        check(installed, version)


@pytest.mark.parametrize("version", ["2.9", "2.8.3", "1.30"])
def test_an_old_version_is_refused(installed: types.ModuleType, version: str) -> None:
    with pytest.raises(LibraryVersionError, match=rf"{version} is installed.*pip install 'some_library>=2.9.1,<2.12'"):
        check(installed, version)


@pytest.mark.parametrize("version", ["2.12.0a0+git", "3.0"])
def test_a_new_version_causes_a_warning(installed: types.ModuleType, version: str) -> None:
    with pytest.warns(UserWarning, match=r"is newer than 2.11.*<2.12"):
        check(installed, version)


def test_every_version_of_a_major_version_is_accepted(
    installed: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TESTED, "some_library", ("2.9", "2"))
    with warnings.catch_warnings(action="error"):
        check(installed, "2.99.1")
    with pytest.warns(UserWarning, match="is newer than 2, .*<3'"):
        check(installed, "3.0")


def test_a_removed_name_is_reported(installed: types.ModuleType) -> None:
    installed.__version__ = "2.11.0"
    with (
        pytest.raises(LibraryVersionError, match=r"2.11.0 does not have .*_gone.*pip install"),
        private_names("some_library"),
    ):
        from some_library import _gone  # type: ignore[import-not-found]  # noqa: F401


def test_a_missing_library_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"), private_names("no_such_library"):
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401


def test_every_library_has_its_own_file() -> None:
    there = {path.stem for path in (ROOT / "distnb/compat").glob("*_internals.py")}
    assert {f"{library.lower()}_internals" for library in TESTED} - there == {"keras_internals"}
    assert 'private_names("keras")' in (ROOT / "distnb/keras/keras_internals.py").read_text()


def test_torchcomms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_TORCHCOMM_AVAILABLE", True)  # as where it is installed
    with torch.distributed.config.patch(use_torchcomms=True), pytest.raises(OptionError, match=r"TORCHCOMMS.*Unset"):
        TorchDistributed().install()
