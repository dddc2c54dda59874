"""Detection of the user's own modules, which engines reload when the notebook does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distnb.notebook.namespace import module_watch
from distnb.notebook.namespace.module_watch import ModuleWatch


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for folder in ("here", "added", "given", "linked"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"module_{folder}.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "given"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "own.pth").write_text(f"import os\n{tmp_path / 'linked'}\n")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path / "site")])
    module_watch._given_folders.cache_clear()
    monkeypatch.chdir(tmp_path / "here")
    for folder in ("here", "added", "given", "linked"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    yield tmp_path
    module_watch._given_folders.cache_clear()
    for folder in ("here", "added", "given", "linked"):
        sys.modules.pop(f"module_{folder}", None)


def test_modules_in_the_working_directory_and_on_added_paths_are_local(files: Path) -> None:
    watch = ModuleWatch()
    watch.local()
    for folder in ("here", "added", "given", "linked"):
        importlib.import_module(f"module_{folder}")
    names = {module.__name__ for module in watch.local()}
    assert {"module_here", "module_added"} <= names
    assert names.isdisjoint({"module_given", "module_linked", "torch", "pytest", "json"})


def test_a_new_module_is_found_even_after_removals(files: Path) -> None:
    watch = ModuleWatch()
    importlib.import_module("module_added")
    assert "module_added" in {module.__name__ for module in watch.local()}
    del sys.modules["module_added"]
    importlib.import_module("module_here")
    assert [module.__name__ for module in watch.local() if module.__name__.startswith("module_")] == ["module_here"]
