"""The provisioner that forks kernels from a process with loaded modules. The Jupyter server loads it.

To Jupyter such a kernel is like any other: a child of the server that leads a process group, gets signals, and can be
waited for. If it cannot be forked, it is started as usual.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from distnb.cluster.local.zygote import Zygote
from distnb.cluster.process_environment import hash_seed, import_environment, is_installed

__all__ = ["SharedMemoryProvisioner"]

_logger = logging.getLogger("distnb.kernels")

_POLL_S = 0.05
_START = "from distnb.cluster.local.zygote import main; main()"


# debugpy otherwise warns in the server's log about modules of Python that a debugger cannot stop in.
_QUIET = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
# The threads of an operator of torch otherwise spin while they wait for each other. If many notebooks compute at once,
# one of them spins while it keeps another from running: six that trained on two cores took 4.4 s a step, and 0.13 s so.
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}


class SharedMemoryProvisioner(LocalProvisioner):
    """A provisioner whose kernels share the memory of the modules that one process has loaded for all of them."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Fork the kernel if its command is `python -m MODULE …`, or start it as usual."""
        forked = await asyncio.to_thread(_fork, cmd, kwargs)
        if forked is None:
            return await super().launch_kernel(cmd, **kwargs)
        self.process: Any = forked
        self.pid = self.pgid = forked.pid
        self.cwd = kwargs.get("cwd") or Path.cwd()
        return self.connection_info


class ForkedKernel:
    """A kernel's process, a child of this one, with the part of `subprocess.Popen` that Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # other code has reaped it
                    pid, status = self.pid, 0
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit status."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("kernel", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to a running process."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


_lock = threading.Lock()
_zygotes: dict[tuple[str, tuple[tuple[str, str], ...]], Zygote] = {}
"""The zygote of each Python, and of each choice of the variables that Python and its libraries read at their start."""


def _fork(command: Sequence[str], settings: Mapping[str, Any]) -> ForkedKernel | None:
    """Fork a kernel. Return None if it has to be started as usual.

    Args:
        command: Its command: `python -m MODULE ARGUMENT…`.
        settings: The arguments that Jupyter passes to `subprocess.Popen`.
    """
    python, *rest = command
    if rest[:1] != ["-m"] or settings.get("independent"):
        return None
    module, *arguments = rest[1:]
    environment: dict[str, str] = {**(settings.get("env") or os.environ), "JPY_PARENT_PID": str(os.getpid())}
    at_start = {name: value for name, value in environment.items() if name.startswith(("PYTHON", "LD_", "DISTNB_"))}
    key = python, tuple(sorted(at_start.items()))
    with open(os.devnull, "rb") as nothing, _lock:
        streams = (nothing.fileno(), _descriptor(settings.get("stdout"), 1), _descriptor(settings.get("stderr"), 2))
        for earlier in (_zygotes.pop(key, None), None):
            try:
                zygote = earlier or _start(python, environment)
                pid = zygote.fork(module, arguments, environment, streams, cwd=settings.get("cwd") or ".")
            except OSError as error:  # that zygote has ended, and a new one may do
                _logger.warning("a kernel could not be forked: %s", error)
                continue
            _zygotes[key] = zygote
            return ForkedKernel(pid)
    return None


def _descriptor(stream: Any, own: int) -> int:
    """Return the descriptor of a stream that Jupyter passes; by default, the one of this process."""
    if stream is None:
        return own
    descriptor: int = stream if isinstance(stream, int) else stream.fileno()
    return descriptor


def _start(python: str, environment: Mapping[str, str]) -> Zygote:
    """Start a zygote, a child of this process that ends with it."""
    path = {} if is_installed() else import_environment()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        process = subprocess.Popen(
            [python, "-c", _START],
            cwd="/",  # where no module of a user's can hide another
            stdin=there.fileno(),
            env={**_PATIENT, **environment, **path, **_QUIET, "PYTHONHASHSEED": hash_seed()},
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name="distnb-zygote", daemon=True).start()  # no zombie is left
    return Zygote(here)
