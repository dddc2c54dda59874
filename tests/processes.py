"""Which processes, ports and files belong to a test run, and what they are doing.

Every process that a test starts, however indirectly, inherits an environment variable with this run's mark, so that
orphans are found too, which have no parent of ours any more.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

MARK_NAME = "DISTNB_TEST_RUN"
MARK = os.environ.setdefault(MARK_NAME, uuid.uuid4().hex)

OF_MODULE: set[int] = set()
"""Processes that a test started for the rest of its module: they are looked for when that ends."""

_STACKS_S = 30.0
_LIVE_AS_LONG_AS_PYTEST = ("multiprocessing.resource_tracker", "torch_shm_manager", "multiprocessing.forkserver")


def marked() -> dict[int, psutil.Process]:
    """All living processes of this test run but the calling one."""
    needle = f"{MARK_NAME}={MARK}".encode()
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if needle in Path(entry.path, "environ").read_bytes():
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process
    return found


def children_of_this_run() -> dict[int, psutil.Process]:
    """`marked()` without those that exec'd pytest and without the helpers that live as long as this process."""
    ours = marked()
    above = {parent.pid for parent in psutil.Process().parents()}
    return {pid: p for pid, p in ours.items() if pid not in above and not _is_helper(p)}


def _is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return not command or any(name in command for name in _LIVE_AS_LONG_AS_PYTEST)


def ancestors(process: psutil.Process) -> set[int]:
    """Pids above a process; empty when it is gone."""
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()


def listening_ports() -> set[tuple[str, int]]:
    """Addresses on which the calling process listens."""
    found = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def run_directories() -> set[Path]:
    """The private directories of clusters that run."""
    return set(Path(os.environ["TMPDIR"]).glob("distnb-*"))


def describe(process: psutil.Process) -> str:
    """One line for a message."""
    try:
        return f"pid {process.pid} ({process.status()}, parent {process.ppid()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error as error:
        return f"pid {process.pid}: {error}"


def stacks(pids: list[int]) -> str:
    """The Python stacks of processes, as py-spy sees them from outside (no help from the process is needed)."""
    # All at once: who asks, after a limit, has a minute until the whole run is ended.
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid"]
    asked = {
        pid: subprocess.Popen([*command, str(pid)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for pid in pids
    }
    deadline = time.monotonic() + _STACKS_S
    parts = []
    for pid, process in asked.items():
        try:
            told, trouble = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            parts.append(told or f"pid {pid}: {trouble.strip()}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            parts.append(f"pid {pid}: no stack within {_STACKS_S:.0f} s")
    return "\n".join(parts)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str = "") -> None:
    """Poll until something holds; an AssertionError that says what did not, when it never does."""
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline  # before looking: this process may itself stand still in between
        if condition():
            return
        if late:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process (of anyone) has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ends(pid: int, timeout_s: float) -> None:
    """Wait until a process (of anyone) has ended; a zombie has."""
    wait_until(lambda: has_ended(pid), timeout_s, f"pid {pid} is still there")


@contextlib.contextmanager
def killed_at_end(pids: Callable[[], list[int]]) -> Iterator[None]:
    """Kill processes that are ours when a block ends, however it ends."""
    try:
        yield
    finally:
        for pid in pids():
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
