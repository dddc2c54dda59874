"""Python processes that need not import torch, because they are forked from a process that has.

`start` replaces `subprocess.Popen([sys.executable, script])` for the tests' scripts, and takes milliseconds instead of
seconds. The process that they are forked from (`tests.support.warm_base`) ends with the process that started it.
In soak there are two, with different hash seeds, because programs must not rely on an equal order of sets on all ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support import hidden_modules, processes

_ROOT = Path(__file__).parents[2]
# Large modules that nearly every script loads. torch would load some of them at an optimizer's first step.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed", "torch.utils.data")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

hash_seeds = 1
"""The number of different hash seeds of scripts. Each needs a base of its own, which loads all modules."""


class Forked:
    """A process that runs a script, with the parts of `subprocess.Popen` that the tests need."""

    def __init__(self, pid: int, status_file: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status_file = status_file

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        if self.returncode is None and self._status_file.exists():
            self.returncode = os.waitstatus_to_exitcode(int(self._status_file.read_text()))
        return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended. Its pid is not used again before its end is reported."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is noticed first, and reported in a moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[bytes]


def start(
    script: Path, number: int, *, env: Mapping[str, str], out: Path, err: Path, cwd: Path | None = None
) -> Forked:
    """Run a script.

    Args:
        script: The file of the script.
        number: The number of the script. In soak even ones have another hash seed than odd ones.
        env: The whole environment. Except for PYTHONPATH, what Python and torch read at their start has no effect.
        out, err: Files for its output. Further files appear next to the first one.
        cwd: The working directory; by default, the caller's.
    """
    status_file = out.with_name(out.name + ".ended")
    for file in (out, err):
        file.touch()  # before the process has begun, its output is empty
    asked = {"script": str(script), "env": dict(env), "out": str(out), "err": str(err), "status_file": str(status_file)}
    return Forked(_server(number).fork({**asked, "cwd": str(cwd or Path.cwd())}), status_file)


# -- the process to be forked, as it is seen from here ----------------------------------------------------------------


class _Server:
    """The process that scripts are forked from."""

    def __init__(self, hash_seed: int) -> None:
        from tests.support import warm_base

        theirs, ours = os.pipe()
        answers, to_answer = os.pipe()
        warm_base.fork("scripts", processes.MARK, [theirs, to_answer], hash_seed=hash_seed)
        os.close(theirs)
        os.close(to_answer)
        self._requests, self._answers = os.fdopen(ours, "wb"), os.fdopen(answers, "rb")

    def fork(self, request: dict[str, Any]) -> int:
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        return int(self._answers.readline())

    def close(self) -> None:
        self._requests.close()
        self._answers.close()


_servers: list[_Server] = []


def _server(number: int) -> _Server:
    if not _servers:
        _servers.extend(_Server(seed) for seed in range(hash_seeds))  # all load at the same time
    return _servers[number % hash_seeds]


def close() -> None:
    """End the processes that `start` has started for all its scripts."""
    while _servers:
        _servers.pop().close()


# -- the process to be forked, from within ----------------------------------------------------------------------------

_ended: dict[int, str] = {}
_main = ModuleType("__main__")


def main_of_script() -> ModuleType:
    """Return the module in which a script runs."""
    return _main


def next_script() -> Any:
    """Serve. In forked processes only, return the code to run."""
    bind_to_parent(processes.WARM_PYTHON)
    # The scripts have no `if __name__ == "__main__":`, and Python 3.14 forks nothing by default.
    multiprocessing.set_start_method("fork")
    gc.freeze()  # at its end Python visits all objects, and would copy these in each process
    answers = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGCHLD, _write_statuses)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            return _become(**request)
        _ended[pid] = request["status_file"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.write(answers, f"{pid}\n".encode())
    os._exit(0)


def bind_to_parent(name: str) -> None:
    """Give this process a name, and let it end with the process that started it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, name.encode())
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_statuses(number: int, frame: Any) -> None:
    while _ended:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # this call interrupts another one that has reaped the last child
            return
        if pid == 0:
            return
        path = _ended.pop(pid)
        Path(path + ".part").write_text(str(status))
        os.rename(path + ".part", path)


def _become(script: str, env: dict[str, str], out: str, err: str, status_file: str, cwd: str) -> Any:
    """Give this process the state of one that has just started."""
    os.setsid()
    bind_to_parent("python")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        opened = os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    hidden_modules.forget_chosen_otherwise(env)
    os.environ.clear()
    os.environ.update(env)
    # The random numbers must differ from those of the original process; Python takes care of its own.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    sys.argv = [script]
    # As in any script: torch looks for packages of devices when it is imported.
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:1] = [os.path.dirname(script), *given]
    if given:
        sys.modules["torch"]._import_device_backends()
    _main.__dict__.update(__file__=script, __builtins__=__builtins__, __loader__=None, __spec__=None)
    sys.modules["__main__"] = _main
    return compile(Path(script).read_text(encoding="utf-8"), script, "exec")
