"""The files of the folders that `--sync` sends: read on the notebook's side, and written on the engine's."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from distnb.errors import OptionError
from distnb.frames import users_folders, with_users_paths
from distnb.machines.users_code import sent_folders
from distnb.machines.users_code.received_files import FilesWritten, WriteFiles
from distnb.machines.users_code.sent_folders import SentFolders, changes, read_folders
from distnb.objects.modes.environment import apply_environment, capture_early
from distnb.objects.modes.python_modes import own_path_entries


class Project:
    """A folder of modules, and a receiver of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader = SentFolders([str(folder)])
        self._known: Mapping[str, bytes] = {}

    def write(self, files: Mapping[str, str | bytes]) -> None:
        for place, text in files.items():
            path = self.folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def sent(self) -> dict[str, bytes | None]:
        """Return the files that the receiver lacks, by their paths in the folder."""
        files = self.reader.read()
        changed = changes(files, self._known)
        self._known = files
        return {place.removeprefix("0/"): content for place, content in sorted(changed.items())}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_python_files_and_packages_are_sent(project: Project) -> None:
    project.write(
        {
            "first.py": "import second",
            "notes.txt": "not sent",
            "tools/script.py": "",
            "tools/notes.txt": "not sent",
            "package/__init__.py": "",
            "package/part.py": b"\xff\xfe",
            "package/compiled.abi3.so": "",
            "package/data/words.txt": "one",
            "package/__pycache__/part.cpython-312.pyc": "no",
            "package/.env": "secret",
            ".git/config.py": "no",
            "venv/pyvenv.cfg": "no",
            "venv/lib/no.py": "no",
        }
    )
    package = ["package/__init__.py", "package/data/words.txt", "package/part.py"]
    assert list(project.sent()) == ["first.py", *package, "tools/script.py"]
    assert project.sent() == {}


def test_only_changed_files_are_sent_again(project: Project) -> None:
    project.write({"package/__init__.py": "", "package/a.py": "x = 1", "package/b.py": ""})
    assert len(project.sent()) == 3
    before = project.reader.read()
    assert project.reader.read() is before
    project.write({"package/a.py": "x = 2"})  # of the same size
    assert project.sent() == {"package/a.py": b"x = 2"}
    (project.folder / "package/b.py").unlink()
    assert project.sent() == {"package/b.py": None}


def test_a_file_that_stays_is_read_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write({"a.py": "x = 1"})
    os.utime(project.folder / "a.py", (1, 1))
    before = project.reader.read()
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("it is read again"))
    assert project.reader.read() is before


def test_links_that_form_a_circle_are_followed_once(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("elsewhere")
    (other / "x.py").touch()
    project.write({"linked/__init__.py": ""})
    (project.folder / "linked/circle").symlink_to(project.folder / "linked")
    (project.folder / "linked/part").symlink_to(other)
    assert list(project.sent()) == ["linked/__init__.py", "linked/part/x.py"]


def test_too_much_is_refused_with_the_largest_files(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_folders, "_MOST_NBYTES", 1 << 20)
    project.write({"small.py": "", "big/__init__.py": "", "big/image.bin": bytes((1 << 20) + 1)})
    with pytest.raises(OptionError, match=r"big/image.bin \(1.0 MB\).*--sync src,lib"):
        project.sent()
    (project.folder / "big/image.bin").unlink()
    monkeypatch.setattr(sent_folders, "_MOST_FILES", 1)
    with pytest.raises(OptionError, match="at most 1 files"):
        project.sent()
    monkeypatch.setattr(sent_folders, "_MOST_VISITED", 2)
    with pytest.raises(OptionError, match="more than 2 files"):
        project.sent()


def test_folders_are_named_by_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert read_folders(False) == ()
    assert read_folders("a,b") == read_folders([Path("a"), "b", "a"]) == (a, b)
    assert read_folders(Path("b")) == (b,)
    with pytest.raises(OptionError, match="/c is not a folder"):
        read_folders(["a", "c"])
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert read_folders(True) == (str(tmp_path),)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "a/script.py", raising=False)
    assert read_folders(True) == (a,)


# -- the engine's side -------------------------------------------------------------------------------------------------


class Receiver:
    """An engine's received files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "folders-0"

    def write(self, files: Mapping[str, bytes | None], *, whole: bool = False) -> None:
        order = WriteFiles(number=1, folders=("/home/me/a", "/home/me/b"), files=files, whole=whole)
        assert order.carry_out(0, self.folder.parent) == FilesWritten(0, 1)


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield Receiver(tmp_path)
    own_path_entries.clear()
    users_folders.clear()
    for name in ("distnb_sent", "distnb_sent_package"):
        sys.modules.pop(name, None)


def test_files_are_written_to_a_private_folder_and_imported(received: Receiver) -> None:
    received.write({"1/distnb_sent.py": b"x = 1"})
    module = importlib.import_module("distnb_sent")
    assert module.x == 1
    assert stat.S_IMODE(received.folder.stat().st_mode) == 0o700
    assert with_users_paths(f"File {module.__file__}:1, in f") == "File /home/me/b/distnb_sent.py:1, in f"
    for value in (2, 3):  # within a second, and of the same size
        received.write({"1/distnb_sent.py": b"x = %d" % value})
        assert importlib.reload(module).x == value


def test_removed_files_leave_no_package(received: Receiver) -> None:
    received.write({"0/distnb_sent_package/sub/a.py": b"", "0/x.py": b"", "1/y.py": b""})
    importlib.import_module("distnb_sent_package.sub.a")
    received.write({"0/distnb_sent_package/sub/a.py": None})
    assert [path.name for path in (received.folder / "0").iterdir()] == ["x.py"]
    received.write({"0/x.py": b""}, whole=True)  # from another notebook, which has no y.py
    assert [*(received.folder / "1").iterdir()] == []


def test_the_folders_stay_on_the_path_and_are_not_returned(received: Receiver) -> None:
    before = capture_early()
    received.write({"0/distnb_sent.py": b""})
    own = [str(received.folder / "0"), str(received.folder / "1")]
    assert sys.path[:2] == own
    assert capture_early() == before
    sys.path.append("/another")
    found = capture_early().since(before)
    assert found.modes["import path"] == (*before.modes["import path"], "/another")
    apply_environment(before)
    assert sys.path == [*own, *before.modes["import path"]]


def test_an_engine_that_cannot_write_says_why(tmp_path: Path) -> None:
    (tmp_path / "folders-3").touch()
    order = WriteFiles(number=7, folders=("/home/me",), files={"0/a.py": b""}, whole=True)
    answer = order.carry_out(3, tmp_path)
    assert answer == FilesWritten(3, 7, answer.error)
    assert "folders-3" in answer.error
