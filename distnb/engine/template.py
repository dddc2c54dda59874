"""The process from which the engines of one machine are forked, so that they share the memory of loaded modules.

Its standard input is a socket of packets to the notebook. For each list of engines that it receives, it forks a process
that forks them, and ends. Only then do the engines begin, as children of the notebook. Thus only the notebook has to
handle the end of an engine:

    notebook   → template   a JSON list of engines, each with its environment and the path of its log
    in between → notebook   "-1 PID", one packet from the process that forks the engines
    engine     → notebook   "ENGINE PID", one packet from each engine
    notebook   → in between an answer, by which it accepts the engines as its children
    in between → engines    one byte each through a pipe; then the process in between ends
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distnb.cluster.local.orphans import request_signal_at_parent_end
from distnb.cluster.local.processes import describe_status
from distnb.cluster.local.zygote import import_named, renew_random_values
from distnb.cluster.process_environment import AGENT_VARIABLE, DEVICE_VARIABLE, ENGINE_VARIABLE
from distnb.topology import parse_device

__all__ = ["fork_engines", "load"]

_PACKET_NBYTES = 1 << 20
_POLL_S = 0.1
_FORKED = ("cpu", "cuda")  # importing torch does not open such a device, but may open others


def load() -> None:
    """Import the modules that every engine needs, and those that the user named. A forked engine has them already.

    Raises:
        StartError: A module that the user named cannot be imported.
    """
    importlib.import_module("torch.distributed")
    importlib.import_module("distnb.engine.app")
    importlib.import_module(os.environ[AGENT_VARIABLE])
    import_named()
    # Last: the user may have named the compiler.
    importlib.import_module("distnb.compat.torch_internals").load_compiler_on_demand()


def fork_engines() -> None:
    """Fork the engines that the notebook names. Return in each of them, and never in the calling process.

    The end of the socket ends this process. A process with threads must not fork, so no thread can watch the notebook.
    """
    with socket.socket(fileno=0) as notebook:
        forked: Collection[str] | None = None
        while order_list := notebook.recv(_PACKET_NBYTES):
            orders = json.loads(order_list)
            if forked is None:
                forked = _load_for_forking() if any(_device(order) in _FORKED for order in orders) else ()
            # The other threads do not exist in a forked process, and the locks that they held are never released.
            alone = len(os.listdir("/proc/self/task")) == 1
            if os.fork() == 0:
                _fork_all(orders, notebook, forked if alone else ())
                return
            if os.waitstatus_to_exitcode(os.wait()[1]) != 0:
                os._exit(1)  # the notebook waits for the engines' packets
    os._exit(0)


def _fork_all(orders: Sequence[Mapping[str, Any]], notebook: socket.socket, forked: Collection[str]) -> None:
    """Fork these engines. Return in each of them, and never in the calling process."""
    request_signal_at_parent_end(signal.SIGKILL)
    notebook.send(f"-1 {os.getpid()}".encode())
    begin, go_ahead = os.pipe()
    for order in orders:
        if os.fork() == 0:
            os.close(go_ahead)
            _become_engine(order, notebook, begin, _device(order) in forked)
            return
    # With its answer the notebook accepts the engines as its children. Without an answer they end with us.
    if _answered(notebook):
        os.write(go_ahead, b"." * len(orders))
    os._exit(0)


def _answered(notebook: socket.socket) -> bool:
    """Wait for the notebook's answer. Exit if an engine ends before it, since the notebook waits for its packet."""
    while not select.select([notebook], [], [], _POLL_S)[0]:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            how = describe_status(os.waitstatus_to_exitcode(status))
            print(f"An engine's process {how} before the engine began.", file=sys.stderr, flush=True)
            os._exit(1)
    return bool(notebook.recv(_PACKET_NBYTES))


def _device(order: Mapping[str, Any]) -> str:
    """Return the type of an engine's device."""
    return parse_device(order["environment"][DEVICE_VARIABLE]).type


def _load_for_forking() -> Collection[str]:
    """Load the engines' modules. Return the types of devices that forked processes can use.

    A forked process cannot use a GPU if an import has used one, or has asked CUDA for their number, as Keras does.
    """
    gc.disable()  # imports leave no garbage
    load()
    importlib.import_module("distnb.compat.ipython_internals").compact_modules()
    gc.freeze()  # a collection writes to every object that it visits, and memory is shared only until it is written to
    if sys.modules["torch"].cuda.is_initialized():
        return ()
    torch_internals = importlib.import_module("distnb.compat.torch_internals")
    return ("cpu",) if torch_internals.refuses_cuda_after_fork() else _FORKED


def _become_engine(order: Mapping[str, Any], notebook: socket.socket, begin: int, fit: bool) -> None:
    """Make the forked process an engine, once the notebook has answered.

    Args:
        order: The engine's environment and the path of its log.
        notebook: The socket to the notebook.
        begin: The reading end of the pipe that lets the engine begin.
        fit: True if the engine can use the modules that were loaded before the fork. Otherwise it executes Python
            again.
    """
    os.setsid()  # a terminal's Ctrl-C is for the notebook, and our group is exactly the processes that end with us
    environment = order["environment"]
    notebook.send(f"{environment[ENGINE_VARIABLE]} {os.getpid()}".encode())
    notebook.close()
    if not os.read(begin, 1):
        os._exit(1)
    os.close(begin)
    os.environ.update(environment)
    os.open(os.devnull, os.O_RDONLY)  # becomes standard input, because 0 is the lowest free descriptor
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if not fit:
        os.execv(sys.executable, sys.orig_argv)
    gc.enable()
    renew_random_values()
