"""The files of local modules: found on the notebook's side, and written on the engine's."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from distnb.machines.modules import local_modules
from distnb.machines.modules.local_modules import LocalModules, ModuleFile, local_file
from distnb.machines.modules.received_modules import ReceivedModules
from distnb.objects.code.definitions import names_of_code
from distnb.objects.code.reads import names_read
from distnb.objects.modes.environment import apply_environment, capture_early, cell_began
from distnb.objects.modes.python_modes import own_path_entries


class Project:
    """A folder of modules on `sys.path`, and a receiver of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notices: list[str] = []
        self.modules = LocalModules(self.notices.append)
        self._known: Mapping[str, bytes] = {}
        self.sent()  # this process has loaded the tests, which are local modules, too

    def write(self, files: Mapping[str, str | bytes]) -> None:
        for place, text in files.items():
            path = self.folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        importlib.invalidate_caches()

    def sent(self, *names: str) -> dict[str, ModuleFile]:
        """Return the files that a new cell sends."""
        cell_began()
        self.modules.need(names)
        self._known, files = self.modules.lacking(self._known)
        return files


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Project(tmp_path)
    for name in set(sys.modules) - before:
        if local_file(name):
            del sys.modules[name]


def test_a_module_is_sent_with_all_that_it_imports(project: Project) -> None:
    project.write(
        {
            "first.py": "import json, numpy\nimport second as s, third\n",
            "second.py": "def f():\n    if True: import fourth; from fifth import (\n        x,  # why\n        y)\n",
            "third.py": "",
            "fourth.py": "from \\\n  package.part import name",
            "fifth.py": "",
            "package/__init__.py": "",
            "package/part.py": "from ..elsewhere import x\nfrom . import other",
            "package/other.py": "",
            "package/tests/test_part.py": "import only_tests_need_it",
            "package/data/words.txt": "one",
            "package/__pycache__/part.cpython-312.pyc": "no",
            "package/.env": "secret",
            "package/.git/config": "no",
            "package/venv/pyvenv.cfg": "no",
            "package/venv/lib/compiled.abi3.so": "no",
            "only_tests_need_it.py": "",
            "unneeded.py": "",
        }
    )
    files = project.sent("first", "numpy.linalg", "not_there")
    package = ["__init__.py", "data/words.txt", "other.py", "part.py", "tests/test_part.py"]
    modules = ["fifth.py", "first.py", "fourth.py", *(f"package/{each}" for each in package), "second.py", "third.py"]
    assert list(files) == modules
    assert files["second.py"] == ModuleFile(
        str(project.folder / "second.py"), (project.folder / "second.py").read_bytes()
    )
    assert project.modules.imports >= {"json", "numpy", "second"}
    assert project.modules.sends("package.part")
    assert not project.modules.sends("numpy")


def test_of_a_namespace_package_only_the_needed_parts_are_sent(project: Project) -> None:
    project.write(
        {
            "space/tools/__init__.py": "from space import single",
            "space/single.py": "from . import sibling",
            "space/sibling.py": "",
            "space/unneeded.py": "",
            "space/images/1.png": "",
        }
    )
    assert list(project.sent("space.tools.sub")) == ["space/sibling.py", "space/single.py", "space/tools/__init__.py"]


def test_loaded_modules_are_sent_even_if_no_text_names_them(project: Project) -> None:
    project.write({"loaded.py": "import numpy", "unloaded.py": ""})
    assert project.sent() == {}
    importlib.import_module("loaded")
    assert list(project.sent()) == ["loaded.py"]
    assert "numpy" not in project.modules.imports  # no program is known to need it
    project.sent("loaded")
    assert "numpy" in project.modules.imports


def test_only_changed_files_are_sent_again(project: Project) -> None:
    project.write({"package/__init__.py": "", "package/a.py": "x = 1", "package/b.py": ""})
    assert len(project.sent("package")) == 3
    os.utime(project.folder / "package/b.py")
    assert project.sent() == {}
    project.write({"package/a.py": "x = 2"})  # of the same size
    assert [(place, file.content) for place, file in project.sent().items()] == [("package/a.py", b"x = 2")]
    (project.folder / "package/b.py").unlink()
    assert project.sent() == {"package/b.py": ModuleFile("", None)}
    assert project.modules.lacking({})[1].keys() >= {"package/__init__.py", "package/a.py"}


def test_a_module_may_become_a_package(project: Project) -> None:
    project.write({"thing.py": "x = 1"})
    importlib.import_module("thing")
    assert list(project.sent()) == ["thing.py"]
    (project.folder / "thing.py").unlink()
    project.write({"thing/__init__.py": "x = 2"})
    files = project.sent()
    assert {place: file.content for place, file in files.items()} == {"thing/__init__.py": b"x = 2", "thing.py": None}


def test_compiled_modules_are_refused_with_a_notice(project: Project) -> None:
    project.write({"fast/__init__.py": "", "fast/_core.abi3.so": "", "compiled.abi3.so": "", "uses.py": "import fast"})
    assert list(project.sent("uses", "compiled")) == ["uses.py"]
    project.sent("uses")
    found = sorted(project.notices)
    assert len(found) == 2
    assert found[0].startswith("distnb: The local module `compiled` is not sent to the engines, because it consists of")
    assert "`fast` is not sent to the engines, because _core.abi3.so in it is compiled. " in found[1]
    assert found[1].endswith("Install it on the engines' machines.")
    assert project.modules.refusal("fast.part") == found[1].removeprefix("distnb: ")


def test_too_much_data_stays(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_modules, "_MOST_DATA_NBYTES", 1 << 20)
    monkeypatch.setattr(local_modules, "_LARGE_NBYTES", (1 << 20) - 1)
    project.write({"big/__init__.py": "", "big/sub/__init__.py": "", "big/sub/x.py": "", "big/data/x.py": ""})
    project.write({"big/data/image.bin": bytes(1 << 20)})
    assert "big/data/image.bin" in project.sent("big")
    assert project.notices == ["distnb: sending 1 MB of local modules to each engine: `big`"]
    project.write({"big/data/more.bin": b"."})
    assert project.sent("big").keys() == {"big/data/image.bin", "big/data/x.py"}  # these are removed
    assert "only the Python code of the local package `big` is sent" in project.notices[1]
    assert project.sent("big") == {}
    assert len(project.notices) == 2


def test_links_that_form_a_circle_are_followed_once(project: Project) -> None:
    project.write({"linked/__init__.py": "", "elsewhere/x.py": ""})
    (project.folder / "linked/circle").symlink_to(project.folder / "linked")
    (project.folder / "linked/part").symlink_to(project.folder / "elsewhere")
    assert list(project.sent("linked")) == ["linked/__init__.py", "linked/part/x.py"]


def test_a_file_that_is_no_python_code_does_no_harm(project: Project) -> None:
    project.write(
        {"odd.py": b"\xff\xfe", "package/__init__.py": "import odd, package.old", "package/old.py": "print 'x'"}
    )
    assert list(project.sent("package")) == ["odd.py", "package/__init__.py", "package/old.py"]


def test_imports_of_code_and_cells_are_found() -> None:
    text = """
def function():
    import os.path
    from package import part as p, other
    class Inner:
        def method(self):
            from .relative import x
"""
    wanted = {"os.path", "package", "package.part", "package.other"}
    assert names_of_code(compile(text, "", "exec")).imports == wanted | {"relative", "relative.x"}
    cell = "!ls\nfrom package import part as p, other\ntry:\n    import os.path\nexcept ImportError: pass"
    assert names_read(cell).imports == wanted


# -- the engine's side -------------------------------------------------------------------------------------------------


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReceivedModules]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = ReceivedModules()
    made.folder = tmp_path / "modules-0"
    yield made
    own_path_entries.clear()
    for name in ("distnb_sent", "distnb_sent_package"):
        sys.modules.pop(name, None)


def test_files_are_written_to_a_private_folder_and_imported(received: ReceivedModules) -> None:
    received.receive({"distnb_sent.py": ModuleFile("/home/me/distnb_sent.py", b"x = 1")})
    module = importlib.import_module("distnb_sent")
    assert module.x == 1
    assert received.folder is not None
    assert stat.S_IMODE(received.folder.stat().st_mode) == 0o700
    assert received.with_users_paths(f"File {module.__file__}:1, in f") == "File /home/me/distnb_sent.py:1, in f"
    for value in (2, 3):  # within a second, and of the same size
        received.receive({"distnb_sent.py": ModuleFile("", b"x = %d" % value)})
        assert importlib.reload(module).x == value


def test_removed_files_leave_no_package(received: ReceivedModules) -> None:
    received.receive({"distnb_sent_package/sub/a.py": ModuleFile("", b"")})
    importlib.import_module("distnb_sent_package.sub.a")
    received.receive({"distnb_sent_package/sub/a.py": ModuleFile("", None)})
    assert received.folder is not None
    assert list(received.folder.iterdir()) == []


def test_the_folder_stays_on_the_path_and_is_not_returned(received: ReceivedModules) -> None:
    before = capture_early()
    received.receive({"distnb_sent.py": ModuleFile("", b"")})
    assert sys.path[0] == str(received.folder)
    assert capture_early() == before
    sys.path.append("/another")
    found = capture_early().since(before)
    assert found.modes["import path"] == (*before.modes["import path"], "/another")
    apply_environment(before)
    assert sys.path == [str(received.folder), *before.modes["import path"]]
