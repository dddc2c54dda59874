"""The end of a process, and its reason, with pidfds and without them."""

from __future__ import annotations

import errno
import os
import queue
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distnb.cluster.local.guardian import end_descriptor
from distnb.cluster.local.processes import Processes
from distnb.cluster.network import require_loopback
from distnb.engine import template
from distnb.errors import StartError
from tests.conftest import needs
from tests.support.processes import wait_until

_WITHIN_S = 20.0


@pytest.fixture(params=["pidfds", "ENOSYS", "EPERM", "a Python without them"])
def forbid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int, flags: int = 0) -> int:
        raise OSError(getattr(errno, request.param), os.strerror(getattr(errno, request.param)))

    if request.param == "a Python without them":
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(os, "P_PIDFD")
    elif request.param != "pidfds":
        monkeypatch.setattr(os, "pidfd_open", refused)


@pytest.mark.usefixtures("forbid")
def test_the_ends_of_processes_are_described() -> None:
    ends: queue.SimpleQueue[tuple[int, str, bool]] = queue.SimpleQueue()
    processes = Processes()
    try:
        script = "import sys; sys.stdin.read(); sys.exit(3)"
        first, second = (
            processes.start([sys.executable, "-c", script], lambda *end: ends.put(end), stdin=subprocess.PIPE)
            for _ in range(2)
        )
        os.kill(first.pid, signal.SIGKILL)
        assert ends.get(timeout=_WITHIN_S) == (first.pid, "was killed by SIGKILL", False)
        processes.expect([second.pid])
        assert second.stdin is not None
        second.stdin.close()
        assert ends.get(timeout=_WITHIN_S) == (second.pid, "exited with code 3", True)
        for each in (first, second):
            wait_until(lambda pid=each.pid: not Path(f"/proc/{pid}").exists(), _WITHIN_S, "it is not reaped")
        assert first.stdin is not None
        first.stdin.close()
    finally:
        processes.close()


@pytest.mark.usefixtures("forbid")
def test_a_descriptor_reports_the_end_of_a_process_that_is_not_a_child() -> None:
    # A child's child, which goes on when the child has ended.
    script = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    descriptor = end_descriptor(pid)
    try:
        assert select.select([descriptor], [], [], 0.1)[0] == []
        os.kill(pid, signal.SIGKILL)
        assert select.select([descriptor], [], [], _WITHIN_S)[0] == [descriptor]
    finally:
        os.close(descriptor)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        end_descriptor(gone.pid)


def test_a_process_with_the_number_of_an_earlier_one_is_not_taken_for_it() -> None:
    ends: queue.SimpleQueue[tuple[int, str, bool]] = queue.SimpleQueue()
    processes = Processes()
    try:
        earlier = processes.start(["sleep", "600"], lambda *end: ends.put(end)).pid
        processes.kill([earlier])
        assert ends.get(timeout=_WITHIN_S) == (earlier, "was killed by SIGKILL", True)
        wait_until(lambda: not Path(f"/proc/{earlier}").exists(), _WITHIN_S, "it is not reaped")
        later = _start_as(earlier, lambda: processes.start(["sleep", "600"], lambda *end: ends.put(end)).pid)
        assert processes.should_run(later)
        assert processes.status(later) is None
        os.kill(later, signal.SIGKILL)
        assert ends.get(timeout=_WITHIN_S) == (later, "was killed by SIGKILL", False)
    finally:
        processes.close()


def _start_as(pid: int, start: Callable[[], int]) -> int:
    """Start processes until one has this number, which another program of the machine may take first."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("the number of the next process can be set by root only")
    while True:
        last.write_text(str(pid - 1))
        if (started := start()) == pid:
            return started


def test_a_process_that_cannot_be_watched_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    processes = Processes()
    try:
        monkeypatch.setattr(os, "pidfd_open", refused)
        with pytest.raises(OSError, match="Too many open files"):
            processes.start(["sleep", "600"], lambda *end: None)  # conftest looks for what is left
    finally:
        monkeypatch.undo()
        processes.close()


def test_an_engine_that_ends_during_the_start_ends_the_others_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    notebook, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with notebook, here:
        parent = os.fork()
        if parent == 0:
            if os.fork() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            template._answered(here)  # the notebook does not reply
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == 1
    assert "was killed by SIGKILL before the engine began" in capfd.readouterr().err


def test_without_a_loopback_interface_nothing_starts(tmp_path: Path) -> None:
    require_loopback()
    unshare = needs("unshare")
    script = "from distnb.cluster.network import require_loopback; require_loopback()"
    ended = subprocess.run([unshare, "-n", sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if "unshare failed" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 1
    assert f"{StartError.__name__}: The loopback interface" in ended.stderr
    assert "ip link set lo up" in ended.stderr
    (tmp_path / "script.py").touch()
    command = [unshare, "-n", sys.executable, "-m", "distnb", "run", "-n", "2", str(tmp_path / "script.py")]
    script = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ip link set lo up" in script.stderr
