"""Engines and kernels that need not import torch, because they are forked from a process that has: the zygote.

A cluster of this machine forks its engines from a template, a process that imports torch first. `patch` makes a
process fork its templates from a zygote; `patch_kernels` makes it fork kernels, too, each with a zygote of its own for
its clusters. That spares each cluster and each kernel seconds of imports. All else is as in `python -m distnb.engine`
and `python -m ipykernel_launcher`: the environment, the standard streams, the session, and the parent process, which
adopts the template or kernel when the process in between has ended:

    pytest ── starts ──▶ zygote ── forks ──▶ process in between, which ends ── forks ──▶ template ── forks ──▶ engines

Modules whose subject is the start of processes set `real` (`pytestmark = pytest.mark.usefixtures("real_processes")`).
Notebooks in browsers and scripts start their engines without a zygote, too.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support import hidden_modules, processes
from tests.support.warm_python import bind_to_parent

real = False
"""Whether processes are started without a zygote."""

_ROOT = str(Path(__file__).parents[2])
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "distnb.engine.app", "distnb.engine.agent")
_ENGINES = ("-P", "-m", "distnb.engine")
_REQUEST_NBYTES = 1 << 20
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


class _Zygote:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: str, streams: Sequence[int]) -> int:
        """Fork a process that becomes a child of this one, and return its pid."""
        from distnb.cluster.local.orphans import adopting_orphans

        request = json.dumps({"arguments": arguments, "environment": dict(environment), "cwd": cwd}).encode()
        with adopting_orphans():
            socket.send_fds(self._connection, [request], streams)
            return int(self._connection.recv(64))


_zygotes: dict[str, tuple[_Zygote, subprocess.Popen[bytes]]] = {}
_of_this_process: _Zygote | None = None  # of a kernel that was forked


def _zygote(mark: str) -> _Zygote:
    """Return the zygote for processes with this mark, which the environment of a forked process shows for ever."""
    if _of_this_process is not None:
        return _of_this_process
    if mark not in _zygotes:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PYTHONPATH": _ROOT,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            processes.MARK_NAME: mark,
        }
        # The last argument lets tests find engines by their command lines.
        command = [
            sys.executable,
            "-P",
            "-c",
            "from tests.support import warm_engines; warm_engines.serve()",
            "distnb.engine",
        ]
        with there:
            process = subprocess.Popen(command, env=environment, stdin=there, start_new_session=True)
        _zygotes[mark] = _Zygote(here), process
    return _zygotes[mark][0]


def close() -> None:
    """End the zygotes of this process."""
    while _zygotes:
        zygote, process = _zygotes.popitem()[1]
        zygote._connection.close()
        process.wait()


def suits(environment: Mapping[str, str]) -> bool:
    """Return whether a forked process would import the same modules in the same state as a new one."""
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return not real and set(path) == {_ROOT} and environment.get("OMP_NUM_THREADS") == "1"


def patch() -> None:
    """Fork this process's templates of engines from a zygote from now on."""
    from distnb.cluster.local import processes as started

    popen = subprocess.Popen

    def start(command: Sequence[str], **settings: Any) -> Any:
        environment, stdin = settings.get("env"), settings.get("stdin")
        is_template = tuple(command[1:]) == _ENGINES and isinstance(stdin, socket.socket)
        if not is_template or environment is None or not suits(environment):
            return popen(command, **settings)
        streams = [_descriptor(settings[name]) for name in ("stdin", "stdout", "stderr")]
        mark = environment.get(processes.MARK_NAME, processes.MARK)
        return AdoptedProcess(_zygote(mark).fork(["distnb.engine"], environment, os.getcwd(), streams))

    class Patched:
        """The module `subprocess`, as `distnb.cluster.local.processes` sees it."""

        Popen = staticmethod(start)

        def __getattr__(self, name: str) -> Any:
            return getattr(subprocess, name)

    started.subprocess = Patched()  # type: ignore[attr-defined, assignment]


def _descriptor(stream: IO[bytes] | socket.socket | int) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def patch_kernels() -> None:
    """Fork the kernels that jupyter_client starts in this process from a zygote from now on."""
    from jupyter_client.provisioning import local_provisioner

    launch = local_provisioner.launch_kernel

    def start(command: list[str], *, env: dict[str, str], cwd: str | None = None, **settings: Any) -> Any:
        if command[0] != sys.executable or not suits(env):
            return launch(command, env=env, cwd=cwd, **settings)
        with open(os.devnull, "r+b") as nowhere:
            streams = [nowhere.fileno()] * 3
            arguments = ["ipykernel_launcher", *command[command.index("-f") :]]
            return AdoptedProcess(_zygote(env[processes.MARK_NAME]).fork(arguments, env, cwd or os.getcwd(), streams))

    local_provisioner.launch_kernel = start


# -- the zygote, from within -------------------------------------------------------------------------------------------


def serve() -> None:
    """Load the modules, and fork a process for each request. Return in no process; a kernel raises SystemExit."""
    bind_to_parent(processes.WARM_PYTHON)
    for name in _PRELOADED:
        importlib.import_module(name)
    hidden_modules.hide()
    gc.freeze()  # a collection would copy the pages of all objects in each process
    _serve(socket.socket(fileno=os.dup(0)))


def _serve(connection: socket.socket) -> None:
    while True:
        request, streams, _, _ = socket.recv_fds(connection, _REQUEST_NBYTES, 3)
        if not request:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()
            while os.getppid() == between:
                os.sched_yield()
            connection.send(str(os.getpid()).encode())  # only now: it leads its group, and has its parent
            connection.close()
            _become(streams=streams, **json.loads(request))
            os._exit(1)
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


def _become(arguments: list[str], environment: dict[str, str], cwd: str, streams: list[int]) -> None:
    """Give this process the state of one that has just started, and run its program."""
    global _of_this_process
    is_engine = arguments == ["distnb.engine"]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python" if is_engine else processes.WARM_KERNEL.encode())
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
    for stream in {each for each in streams if each > 2}:
        os.close(stream)
    os.chdir(cwd)
    hidden_modules.forget_chosen_otherwise(environment)
    os.environ.clear()
    os.environ.update(environment)
    _renew_environment()
    tempfile.tempdir = None
    if is_engine:
        sys.argv, sys.orig_argv = arguments, [sys.executable, *_ENGINES]
        runpy.run_module("distnb.engine", run_name="__main__", alter_sys=True)
        return
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        os.setsid()
        bind_to_parent(processes.WARM_PYTHON)
        _serve(there)
    there.close()
    _of_this_process = _Zygote(here)
    patch()
    sys.argv = arguments
    importlib.import_module("ipykernel.kernelapp").launch_new_instance()
    sys.exit()


def _renew_environment() -> None:
    """Note the environment as the one with which this process began: the zygote's was another."""
    modes = importlib.import_module("distnb.objects.modes.python_modes")
    modes._variables_at_first.clear()
    modes._variables_at_first.update(modes._variables)
