"""The private directory of a cluster, and the process that removes it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from distnb.cluster.local.guardian import remove_directory
from distnb.cluster.local.run_directory import RunDirectory
from distnb.errors import StartError
from tests.support import processes

_WITHIN_S = 10.0
_OWNER = """
import os, subprocess, sys, threading
from distnb.cluster.local.run_directory import RunDirectory
directory = RunDirectory()
sleepers = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(3)]
directory.end_with_owner(sleepers[0].pid)
directory.end_with_owner(sleepers[1].pid)
directory.forget(sleepers[1].pid)
writer = f"while :; do mkdir -p {directory.path}/a/b; : > {directory.path}/a/b/$RANDOM; done"
directory.end_with_owner(subprocess.Popen(["bash", "-c", writer], start_new_session=True, stderr=subprocess.DEVNULL).pid)
print(directory.path, *(sleeper.pid for sleeper in sleepers), flush=True)
threading.Event().wait()
"""


def test_a_run_directory_is_private_and_is_removed(tmp_path: Path) -> None:
    directory = RunDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    (directory.path / "file").touch()
    directory.remove()
    assert not directory.path.exists()
    assert [*directory.path.parent.glob(directory.path.name + "*")] == []


def test_another_user_cannot_keep_it_from_being_removed(tmp_path: Path) -> None:
    directory = RunDirectory()
    Path(f"{directory.path}.removed").touch()  # all that others see is the name, from which they may guess another one
    directory.remove()
    assert not directory.path.exists()
    Path(f"{directory.path}.removed").unlink()


def test_a_directory_that_cannot_be_renamed_is_removed_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "doomed" / "folder").mkdir(parents=True)
    remove_directory(str(tmp_path / "doomed"), "missing/renamed")
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_created_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(StartError, match="Set TMPDIR"):
        RunDirectory()


def test_its_path_leaves_room_for_socket_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", str(long))
    directory = RunDirectory()
    assert len(str(directory.path)) < 75
    directory.remove()


def test_a_forked_child_does_not_remove_it() -> None:
    directory = RunDirectory()
    child = os.fork()
    if child == 0:
        directory.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert directory.path.exists()
    directory.remove()


def test_started_processes_end_with_their_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        path, *pids = owner.stdout.readline().split()
    registered, forgotten, unregistered = map(int, pids)
    owner.kill()
    owner.wait()
    try:
        processes.ends(registered, _WITHIN_S)
        processes.wait_until(lambda: not os.path.exists(path), _WITHIN_S, "the directory is still there")
        assert not processes.has_ended(forgotten)
        assert not processes.has_ended(unregistered)
    finally:
        os.kill(forgotten, signal.SIGKILL)
        os.kill(unregistered, signal.SIGKILL)


def test_removal_succeeds_while_a_process_writes(tmp_path: Path) -> None:
    doomed = tmp_path / "doomed"
    doomed.mkdir()
    writer = subprocess.Popen(
        ["bash", "-c", f"while :; do mkdir {doomed}/$RANDOM; : > {doomed}/$RANDOM; done"], stderr=subprocess.DEVNULL
    )
    try:
        processes.wait_until(lambda: len(os.listdir(doomed)) > 20, _WITHIN_S)
        remove_directory(str(doomed), "renamed")
        assert os.listdir(tmp_path) == []
    finally:
        writer.kill()
        writer.wait()
