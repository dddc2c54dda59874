"""However the notebook ends, all its processes and files are gone within 10 s."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

_WITHIN_S = 10.0


def forbid_pidfds() -> None:
    """Make pidfd_open an unknown call for this process and its children, as on an old kernel (seccomp)."""
    libc = ctypes.CDLL(None, use_errno=True)
    load, equal, give, no_call, allowed, pidfd_open = 0x20, 0x15, 0x06, 0x50000 | errno.ENOSYS, 0x7FFF0000, 434
    steps = [(load, 0, 0, 0), (equal, 0, 1, pidfd_open), (give, 0, 0, no_call), (give, 0, 0, allowed)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges, as a filter requires
    assert libc.prctl(22, 2, program, 0, 0) == 0


def started_notebook(
    ending: str, behaviour: str = "", *, pidfds: bool = True
) -> tuple[subprocess.Popen[str], list[int], Path]:
    """Return a notebook process with 2 engines, its engines, and its directory."""
    notebook = subprocess.Popen(
        [sys.executable, "-m", "tests.support.notebook_process", "2", ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "DISTNB_TEST_BEHAVIOUR": behaviour},
        preexec_fn=None if pidfds else forbid_pidfds,
    )
    assert notebook.stdout is not None
    with notebook.stdout:
        state = json.loads(notebook.stdout.readline() or "{}")
    return notebook, state["engines"], Path(state["directory"])


def assert_all_gone(directory: Path) -> None:
    processes.wait_until(lambda: not processes.children_of_this_run(), _WITHIN_S, _left())
    processes.wait_until(lambda: not directory.exists(), _WITHIN_S, f"{directory} is still there")


def _left() -> str:
    return "\n".join(processes.describe(process) for process in processes.children_of_this_run().values())


@pytest.mark.parametrize(
    ("behaviour", "pidfds"),
    [pytest.param("", True, marks=pytest.mark.soak), ("workers", False), ("gil", True)],
)
def test_sigkill_of_the_notebook_ends_its_engines(behaviour: str, pidfds: bool) -> None:
    notebook, engines, directory = started_notebook("wait", behaviour, pidfds=pidfds)
    try:
        if behaviour == "workers":
            assert len(psutil.Process(engines[0]).children()) >= 2
        if behaviour == "gil":
            # The engines' own threads do not run any more, so the guardian must end them.
            processes.wait_for_computing(engines, 60)
        assert len(processes.children_of_this_run()) >= 4  # notebook, engines, controller
    finally:
        notebook.kill()
        notebook.wait()
    assert_all_gone(directory)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.soak) for each in (signal.SIGHUP, signal.SIGQUIT))],
)
def test_other_signals_end_the_engines_too(number: signal.Signals) -> None:
    notebook, _, directory = started_notebook("wait", "workers")
    notebook.send_signal(number)
    notebook.wait(_WITHIN_S)
    assert_all_gone(directory)


@pytest.mark.parametrize(
    "ending", ["return", *(pytest.param(each, marks=pytest.mark.soak) for each in ("raise", "_exit"))]
)
def test_an_exit_without_stopping_the_cluster_ends_the_engines(ending: str) -> None:
    notebook, _, directory = started_notebook(ending, "workers")
    notebook.wait(_WITHIN_S)
    assert_all_gone(directory)


def test_sigkill_of_the_notebook_ends_engines_that_are_starting() -> None:
    before = processes.run_directories()
    notebook = subprocess.Popen(
        [sys.executable, "-m", "tests.support.notebook_process", "2", "wait"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "DISTNB_TEST_BEHAVIOUR": "stall"},
    )
    try:
        processes.wait_until(lambda: len(psutil.Process(notebook.pid).children()) >= 3, 30, "no engines were launched")
        directories = [*processes.run_directories() - before]
    finally:
        notebook.kill()
        notebook.wait()
    assert len(directories) == 1
    assert_all_gone(directories[0])


def test_sigkill_of_distnb_run_ends_its_replicas(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from torch.utils.data import DataLoader\n"
        "batches = iter(DataLoader(range(100), num_workers=2))\n"
        "next(batches)\n"
        "print('holding', flush=True)\n"
        "sum(range(10**12))\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "distnb", "run", str(script), "-n", "2"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert launcher.stdout is not None
        with launcher.stdout:
            assert sorted(launcher.stdout.readline().rstrip() for _ in range(2)) == ["[0] holding", "[1] holding"]
        processes.wait_for_computing(
            [each.pid for each in psutil.Process(launcher.pid).children() if each.children()], 60
        )
    finally:
        launcher.kill()
        launcher.wait()
    processes.wait_until(lambda: not processes.children_of_this_run(), _WITHIN_S, _left())
