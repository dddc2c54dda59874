"""The processes, ports and files of a test run, and the state of its processes.

Every process that a test starts, however indirectly, inherits an environment variable with this run's mark. So orphans
are found, too, although their parent is gone. Each of pytest-xdist's workers is a run of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

MARK_NAME = "DISTNB_TEST_RUN"
MARK = os.environ.setdefault(MARK_NAME, uuid.uuid4().hex)
if (_worker := os.environ.get("PYTEST_XDIST_WORKER", "")) not in MARK:
    MARK = os.environ[MARK_NAME] = f"{MARK}-{_worker}"

OF_MODULE: set[int] = set()
"""The processes that a test started for the rest of its module. They are checked when the module ends."""
SHARED_MARK = MARK + "-shared"
"""The mark of the notebook that modules share, whose processes belong to no test."""

WARM_PYTHON = "warm-python"
"""The name of the processes from which scripts, engines and kernels are forked. These have another name."""
WARM_KERNEL = "warm-kernel"
"""The name of kernels that were forked. Their command line is the one of the process from which they were forked."""

_STACKS_S = 30.0
_OF_LIBRARIES = ("multiprocessing.resource_tracker", "torch_shm_manager", "multiprocessing.forkserver")


# The directories in /proc, with their inodes, of processes that belong to other runs for good.
_of_others: set[tuple[str, int]] = set()


def marked(mark: str = MARK) -> dict[int, psutil.Process]:
    """Return all living processes of this test run, except the calling one and those that others are forked from."""
    needle = f"{MARK_NAME}={mark}\0".encode()
    found, others = {}, set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        if (known := (entry.name, entry.inode())) in _of_others:
            others.add(known)
            continue
        with contextlib.suppress(OSError, psutil.Error):
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:  # the kernel's, another user's, or one that has just ended
                if _start_time_of(entry.path) < _start_time_of("/proc/self"):
                    others.add(known)
                raise
            # The environment is empty during an exec. A child of this process belongs to the run in any case.
            if needle in environment or (not environment and _parent_of(entry.path) == os.getpid()):
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE and process.name() != WARM_PYTHON:
                    found[process.pid] = process
            elif environment and _belongs_to_others(environment, entry.path):
                others.add(known)
    _of_others.clear()
    _of_others.update(others)
    return found


def _belongs_to_others(environment: bytes, entry: str) -> bool:
    """Return whether a process belongs to another worker, or is older than this one: none of ours begins like that."""
    theirs = environment.partition(f"{MARK_NAME}=".encode())[2].partition(b"\0")[0].decode()
    if theirs:
        return not MARK.startswith(theirs) and not theirs.startswith(MARK)
    return _start_time_of(entry) < _start_time_of("/proc/self")


def _start_time_of(entry: str) -> int:
    return int(Path(entry, "stat").read_text().rpartition(")")[2].split()[19])


def _parent_of(entry: str) -> int:
    return int(Path(entry, "stat").read_text().rpartition(")")[2].split()[1])


def children_of_this_run() -> dict[int, psutil.Process]:
    """Return `marked()` without processes that exec'd pytest and those that live as long as this process."""
    return {pid: p for pid, p in marked().items() if pid not in _above() and not _ends_with_this_process(p)}


@functools.cache
def _above() -> set[int]:
    return {parent.pid for parent in psutil.Process().parents()}


def _ends_with_this_process(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    # The environment is empty during an exec, when the parent already continues. Such a process is ours.
    return any(name in command for name in _OF_LIBRARIES)


def ancestors(process: psutil.Process) -> set[int]:
    """Return the pids above a process; none if it is gone."""
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()


def listening_ports() -> set[tuple[str, int]]:
    """Return the addresses on which the calling process listens."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # /proc/net/tcp would list every connection of the machine
        with contextlib.suppress(OSError):  # closed by now
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    internet = each.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(each.getsockname()[:2])
    return found


def run_directories() -> set[Path]:
    """Return the private directories of running clusters."""
    return set(Path(os.environ["TMPDIR"]).glob("distnb-*"))


def describe(process: psutil.Process) -> str:
    """Return a line about a process, for a message."""
    try:
        return f"pid {process.pid} ({process.status()}, parent {process.ppid()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error as error:
        return f"pid {process.pid}: {error}"


def stacks(pids: list[int]) -> str:
    """Return the Python stacks of processes, read from outside by py-spy, without their help."""
    deadline = time.monotonic() + _STACKS_S
    texts: dict[int, str] = {}
    # py-spy does not stop a process to read it, so a running one may show no thread. It is asked again then.
    while time.monotonic() < deadline and (left := [pid for pid in pids if "Thread" not in texts.get(pid, "")]):
        texts.update(_asked(left, deadline))
        if not any("Python v" in texts[pid] for pid in left if "Thread" not in texts[pid]):
            break
    return "\n".join(texts[pid] for pid in pids)


def _asked(pids: list[int], deadline: float) -> dict[int, str]:
    # All at once: after a limit, there is a minute until the whole run is ended.
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid"]
    asked = {
        pid: subprocess.Popen([*command, str(pid)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for pid in pids
    }
    texts = {}
    for pid, process in asked.items():
        try:
            shown, trouble = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            texts[pid] = shown or f"pid {pid}: {trouble.strip()}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            texts[pid] = f"pid {pid}: no stack within {_STACKS_S:.0f} s"
    return texts


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str = "") -> None:
    """Poll until a condition holds. Raise an AssertionError with `what` if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline  # read first, because this process may be suspended in between
        if condition():
            return
        if late:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.01)


def wait_for_computing(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until each process has used some processor time from now on: a thread of it computes."""

    def used(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    before = {pid: used(pid) for pid in pids}
    wait_until(lambda: all(used(pid) > before[pid] + 0.3 for pid in before), timeout_s, "a process computes nothing")


def has_ended(pid: int) -> bool:
    """Return whether a process (of any parent) has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ends(pid: int, timeout_s: float) -> None:
    """Wait until a process (of any parent) has ended; a zombie has."""
    wait_until(lambda: has_ended(pid), timeout_s, f"pid {pid} is still there")


@contextlib.contextmanager
def killed_at_end(pids: Callable[[], list[int]]) -> Iterator[None]:
    """Kill our processes when a block ends, however it ends."""
    try:
        yield
    finally:
        for pid in pids():
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
