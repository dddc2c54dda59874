"""The process from which the engines of one machine are forked: what all of them load is loaded once, and shared.

Its standard input is a socket of packets to the notebook. It is told the engines, forks them, and ends: only then they
begin, as children of the notebook. So nobody but the notebook has to know how one ends, and what is read at import,
such as environment variables, is read anew whenever engines are replaced.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from distnb.cluster.local.orphans import request_signal_at_parent_end
from distnb.cluster.local.processes import describe_status
from distnb.cluster.process_environment import AGENT_VARIABLE, DEVICE_VARIABLE, ENGINE_VARIABLE
from distnb.topology import parse_device

__all__ = ["fork_engines", "load"]

_PACKET_NBYTES = 1 << 20
_LOOK_S = 0.1
_FORKED = ("cpu", "cuda")  # torch's import touches no such device; of others the import may be what opens one


def load() -> None:
    """Import what every engine needs; a forked one has it already."""
    importlib.import_module("torch.distributed")
    importlib.import_module("distnb.engine.app")
    importlib.import_module(os.environ[AGENT_VARIABLE])


def fork_engines() -> None:
    """Fork the engines that the notebook names. Returns in each of these, and never in the calling process."""
    # No thread could watch the notebook: a process with threads is not to fork. The kernel ends this one.
    request_signal_at_parent_end(signal.SIGKILL)
    with socket.socket(fileno=0) as notebook:
        told = notebook.recv(_PACKET_NBYTES)
        if not told:
            os._exit(1)
        orders = json.loads(told)
        fit = any(_may_fork(order["environment"]) for order in orders) and _load_for_forking()
        begin, let_begin = os.pipe()
        for order in orders:
            if os.fork() == 0:
                os.close(let_begin)
                _become(order, notebook, begin, fit and _may_fork(order["environment"]))
                return
        # An answer says that they are the notebook's children from our end on. Without one they end with us.
        if _answered(notebook):
            os.write(let_begin, b"." * len(orders))
    os._exit(0)


def _answered(notebook: socket.socket) -> bool:
    """Wait for the notebook's answer. Exit if an engine ends before it: the notebook waits for its word."""
    while not select.select([notebook], [], [], _LOOK_S)[0]:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            how = describe_status(os.waitstatus_to_exitcode(status))
            print(f"A process that was to become an engine {how} before it had begun.", file=sys.stderr, flush=True)
            os._exit(1)
    return bool(notebook.recv(_PACKET_NBYTES))


def _may_fork(environment: Mapping[str, str]) -> bool:
    return parse_device(environment[DEVICE_VARIABLE]).type in _FORKED


def _load_for_forking() -> bool:
    """Load it all. False where something has begun to use a GPU, which no forked process could go on with."""
    gc.disable()  # nothing that imports leave is garbage
    load()
    gc.freeze()  # a collection writes to every object that it looks at, and memory is shared until it is written to
    return not sys.modules["torch"].cuda.is_initialized()


def _become(order: Mapping[str, Any], notebook: socket.socket, begin: int, fit: bool) -> None:
    """In the forked process: begin as the engine that is wanted, once the notebook has it; if `fit`, with what was
    loaded before the fork."""
    # Threads that live on through a fork are not there in the new process, and locks that they hold are never released.
    fit = fit and len(os.listdir(f"/proc/{os.getppid()}/task")) == 1
    os.setsid()  # a terminal's Ctrl-C is for the notebook; and what ends with us is exactly our group
    environment = order["environment"]
    notebook.send(f"{environment[ENGINE_VARIABLE]} {os.getpid()}".encode())
    notebook.close()
    if not os.read(begin, 1):
        os._exit(1)
    os.close(begin)
    os.environ.update(environment)
    os.open(os.devnull, os.O_RDONLY)  # as standard input, whose number is the lowest that is free
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if not fit:
        os.execv(sys.executable, sys.orig_argv)
    gc.enable()
    _be_another()


def _be_another() -> None:
    """What is chosen at random when it is imported is chosen anew. Python's `random` does so by itself."""
    multiprocessing.current_process().authkey = os.urandom(32)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
