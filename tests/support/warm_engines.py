"""Engines and kernels that need not import torch, because they are forked from a process that has: the zygote.

`patch` makes a process fork the templates of its engines from a zygote, as a kernel of `distnb kernel` does
(`distnb.cluster.local.zygote`), and `patch_kernels` makes it fork kernels, too. That spares each cluster and each
kernel seconds of imports. The zygote is the same as there but for what it loads, and for the processes' names.

Modules whose subject is the start of processes set `real` (`pytestmark = pytest.mark.usefixtures("real_processes")`).
Notebooks in browsers and scripts start their engines without a zygote, too.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import hidden_modules, processes, warm_base
from tests.support.warm_python import bind_to_parent

real = False
"""Whether processes are started without a zygote."""

_ROOT = str(Path(__file__).parents[2])
_PRELOADED = ("distnb.engine.app", "distnb.engine.agent")
_PR_SET_NAME = 15


class AdoptedProcess:
    """A process that was forked from a zygote and adopted by this process, with the interface of `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end, without a limit."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # other code has reaped it
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


# -- the zygote, as it is seen by the process that uses it ------------------------------------------------------------

_zygotes: dict[str, Any] = {}


def _zygote(mark: str) -> Any:
    """Return the zygote for processes with this mark, which the environment of a forked process shows for ever."""
    from distnb.cluster.local.zygote import Zygote

    if mark not in _zygotes:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            warm_base.fork("engines", mark, [there.fileno()])
        _zygotes[mark] = Zygote(here)
    return _zygotes[mark]


def close() -> None:
    """End the zygotes of this process."""
    while _zygotes:
        _zygotes.popitem()[1].close()


def suits(environment: Mapping[str, str]) -> bool:
    """Return whether a forked process would import the same modules in the same state as a new one."""
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return not real and set(path) == {_ROOT} and environment.get("OMP_NUM_THREADS") == "1"


class _ForTemplates:
    """The zygote from which this process forks templates."""

    def fork(self, module: str, words: Sequence[str], environment: Mapping[str, str], *rest: Any, **given: Any) -> int:
        """Fork a template. Raise OSError if it has to be started."""
        if not suits(environment):
            raise OSError
        mark = environment.get(processes.MARK_NAME, processes.MARK)
        return int(_zygote(mark).fork(module, words, environment, *rest, **given))


def patch() -> None:
    """Fork this process's templates of engines from a zygote from now on."""
    from distnb.cluster.local import forking

    found = _ForTemplates()
    forking.zygote_of_this_process = lambda: found  # type: ignore[assignment, return-value]


def patch_kernels() -> None:
    """Fork the kernels that jupyter_client starts in this process from a zygote from now on."""
    from jupyter_client.provisioning import local_provisioner

    launch = local_provisioner.launch_kernel

    def start(command: list[str], *, env: dict[str, str], cwd: str | None = None, **settings: Any) -> Any:
        if command[0] != sys.executable or not suits(env):
            return launch(command, env=env, cwd=cwd, **settings)
        with open(os.devnull, "r+b") as nowhere:
            streams = [nowhere.fileno()] * 3
            arguments = command[command.index("-f") :]
            zygote = _zygote(env[processes.MARK_NAME])
            return AdoptedProcess(zygote.fork("ipykernel_launcher", arguments, env, streams, cwd=cwd or "."))

    local_provisioner.launch_kernel = start


# -- the zygote, from within -------------------------------------------------------------------------------------------


def serve() -> None:
    """Load what only engines and kernels need, and fork a process for each request. The base has loaded the rest."""
    bind_to_parent(processes.WARM_PYTHON)
    sys.path.remove("")  # the directory of `python -c`
    from distnb.cluster.local import zygote

    become, serve_requests = zygote._become, zygote._serve

    def become_named(*, module: str, environment: dict[str, str], **given: Any) -> None:
        name = "python" if module == zygote.ENGINES else processes.WARM_KERNEL
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
        hidden_modules.forget_chosen_otherwise(environment)
        become(module=module, environment=environment, **given)

    def serve_named(connection: socket.socket) -> None:
        bind_to_parent(processes.WARM_PYTHON)
        serve_requests(connection)

    zygote._become, zygote._serve = become_named, serve_named  # type: ignore[assignment]
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a collection would copy the pages of all objects in each process
    zygote._serve(socket.socket(fileno=os.dup(0)))
