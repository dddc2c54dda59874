"""A process from which others are forked, so that they share the memory of the modules that it has loaded: the zygote.

It is a child of the process that asks for others, which adopts them: to that process they are children that it could
have started itself. Requests arrive at the zygote's standard input, a socket that nobody else can reach. The zygote
never runs a thread of Python's, and ends with its parent:

    parent ── starts ──▶ zygote ── forks ──▶ process in between, which ends ── forks ──▶ process
    parent ── {"module": "ipykernel_launcher", …} and three streams ──▶ zygote
    parent ◀── "4711" ── process, now a child of the parent

A kernel that was forked so has a zygote of its own, forked before the kernel's first thread, for its engines' template.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from distnb.cluster.local.orphans import adopting_orphans, request_signal_at_parent_end
from distnb.cluster.process_environment import PRELOAD_VARIABLE
from distnb.errors import StartError

__all__ = ["ENGINES", "Zygote", "import_named", "main", "renew_random_values", "zygote_of_this_process"]

ENGINES = "distnb.engine"
"""The module of engines. The processes of all other modules get a zygote of their own."""

_ASKS_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
_REQUEST_NBYTES = 1 << 20
_MODULES = (
    # what all engines use
    *("torch", "torch.distributed", "torch.utils.data", "numpy.random", "sqlite3", "distnb.strategies.mirrored"),
    *("distnb.engine.app", "distnb.engine.agent", "distnb.engine.template", "tornado.platform.asyncio"),
    *("IPython.core.completerlib", "IPython.core.oinspect", "concurrent.futures.process"),
    # what they load for a program
    *("distnb.objects.modes.torch_modes", "distnb.objects.modes.numpy_modes", "distnb.runtime.chief_work.chief_first"),
    *("distnb.strategies.context", "distnb.strategies.nn", "torch._subclasses.schema_check_mode"),
    # what all kernels use
    *("ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell", "ipykernel.debugger", "jedi"),
    *("IPython.core.completer", "matplotlib_inline.backend_inline", "ipywidgets", "anywidget"),
    *("IPython.core.logger", "IPython.core.magics.extension", "IPython.extensions.storemagic", "pexpect"),
    *("importlib.readers", "zmq.utils.garbage", "faulthandler", "distnb.widgets.widget_view"),
    *("distnb.magics.extension", "distnb.widgets.front", "distnb.notebook.session", "distnb.notebook.remote_runtime"),
)


class Zygote:
    """The connection to a zygote that is a child of this process. Any thread may call `fork`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        *,
        options: Sequence[str] = (),
        cwd: str | Path = ".",
    ) -> int:
        """Start a process that runs `python OPTIONS -m MODULE ARGUMENTS`, as the leader of a group. Return its pid.

        Args:
            streams: The descriptors of its standard input, output and error.

        Raises:
            OSError: The zygote has ended, or cannot fork.
        """
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "options": list(options),
            "cwd": os.path.abspath(cwd),
        }
        with self._lock, adopting_orphans():
            socket.send_fds(self._connection, [json.dumps(request).encode()], list(streams))
            answer = self._connection.recv(_REQUEST_NBYTES)
        if not answer:
            raise ConnectionResetError("the process from which others are forked has ended")
        return int(answer)

    def close(self) -> None:
        """End the zygote. The processes that were forked from it stay."""
        self._connection.close()


_of_this_process: Zygote | None = None


def zygote_of_this_process() -> Zygote | None:
    """Return the zygote from which this process can fork engines; None if it was not forked from a zygote itself."""
    return _of_this_process


def main() -> NoReturn:
    """Load the modules, those of DISTNB_PRELOAD included, and fork processes until the parent closes its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    sys.path.remove("")  # the directory of `python -c`
    connection = socket.socket(fileno=os.dup(0))
    gc.disable()  # imports leave no garbage
    for name in _MODULES:
        importlib.import_module(name)
    importlib.import_module("distnb.notebook.namespace.module_watch").note_libraries()
    import_named()
    importlib.import_module("distnb.compat.torch_internals").load_compiler_on_demand()
    importlib.import_module("distnb.compat.ipython_internals").compact_modules()
    gc.freeze()  # a collection writes to every object that it visits, and memory is shared only until it is written to
    _serve(connection)


def import_named() -> None:
    """Import the modules that DISTNB_PRELOAD names.

    If they call `torch.cuda.is_available()`, it asks the driver. CUDA, once asked, refuses to work in forked processes.

    Raises:
        StartError: A module cannot be imported.
    """
    before = os.environ.get(_ASKS_DRIVER)
    os.environ[_ASKS_DRIVER] = "1"
    try:
        for name in filter(None, map(str.strip, os.environ.get(PRELOAD_VARIABLE, "").split(","))):
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise StartError(
                    f"{PRELOAD_VARIABLE} names {name}, which an engine cannot import: {error}. Correct the variable."
                ) from error
    finally:
        if before is None:
            del os.environ[_ASKS_DRIVER]
        else:
            os.environ[_ASKS_DRIVER] = before


def _serve(connection: socket.socket) -> NoReturn:
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
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


def _become(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    options: list[str],
    cwd: str,
    streams: list[int],
) -> NoReturn:
    """Give this process the state of one that has just started, and run its module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
    for stream in {each for each in streams if each > 2}:
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module("distnb.objects.modes.python_modes").process_began()
    tempfile.tempdir = None
    renew_random_values()
    sys.modules["torch"].default_generator.seed()
    if module != ENGINES:
        _fork_own_zygote()
    gc.enable()
    if "-P" not in options:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; ipykernel removes it, or else a PYTHONPATH that is equal
    sys.argv = [module, *arguments]
    sys.orig_argv[:] = [sys.executable, *options, "-m", module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    finally:
        if isinstance(sys.exc_info()[1], Exception):
            sys.excepthook(*sys.exc_info())
            code = 1
    sys.exit(code)


def _fork_own_zygote() -> None:
    global _of_this_process
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        # A process that this one forks later may hold the socket open.
        request_signal_at_parent_end(signal.SIGKILL)
        here.close()
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _serve(there)
    there.close()
    _of_this_process = Zygote(here)


def renew_random_values() -> None:
    """Renew the random values that imports have chosen. Python's `random` reseeds itself after a fork."""
    multiprocessing.current_process().authkey = os.urandom(32)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
