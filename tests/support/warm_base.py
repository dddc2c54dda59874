"""The process that loads the large modules, once for each process of pytest: all others are forked from it.

    pytest ── starts ──▶ base ── forks ──▶ zygote of engines and kernels (`warm_engines`), one for each mark
                              └─ forks ──▶ server of scripts (`warm_python`)

A forked process shows the environment and the arguments with which the base was started. So it writes its own mark over
the base's: tests find processes by their marks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support import hidden_modules, processes, warm_python

_ROOT = Path(__file__).parents[2]
_OF_ENGINES = "distnb.engine"  # the last argument, by which tests find engines
_REQUEST_NBYTES = 1 << 10
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)  # the fields of /proc/self/stat after the name: begin and end in memory

_bases: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}


def fork(role: str, mark: str, streams: Sequence[int], *, hash_seed: int = 0) -> None:
    """Fork a process from a base.

    Args:
        role: "engines" or "scripts".
        mark: The mark in its environment.
        streams: The descriptors of its first standard streams.
        hash_seed: The seed of hashes of strings. Each has a base of its own.
    """
    if hash_seed not in _bases:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "PYTHONHASHSEED": str(hash_seed),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # Keras asks for GPUs, and CUDA would refuse the forked processes
        }
        del environment[processes.MARK_NAME]
        environment |= {processes.MARK_NAME: processes.MARK, "ROOM": "for the end of a longer mark"}
        command = [sys.executable, "-c", "from tests.support import warm_base; exec(warm_base.FORKED)", _OF_ENGINES]
        with there:
            process = subprocess.Popen(command, env=environment, stdin=there, start_new_session=True)
        _bases[hash_seed] = here, process
    socket.send_fds(_bases[hash_seed][0], [f"{role} {mark}".encode()], list(streams))


def close() -> None:
    """End the bases."""
    while _bases:
        connection, process = _bases.popitem()[1]
        connection.close()
        process.wait()


# -- the base, from within --------------------------------------------------------------------------------------------

# The code of a script runs in its module `__main__`, so that Python ends as after any script.
FORKED = """
exec(warm_base.next_script(), warm_base.warm_python.main_of_script().__dict__)
"""


def next_script() -> Any:
    """Load the modules, and fork a process for each request. In a script's process only, return the code to run."""
    warm_python.bind_to_parent(processes.WARM_PYTHON)
    connection = socket.socket(fileno=os.dup(0))
    atexit.register(_keep_modules)  # what is registered first is called last
    gc.disable()
    for name in warm_python.PRELOADED:
        importlib.import_module(name)
    hidden_modules.hide()
    gc.freeze()  # a collection would copy the pages of all objects in each process
    _loaded.update(sys.modules)
    forked = []
    while True:
        request, streams, _, _ = socket.recv_fds(connection, _REQUEST_NBYTES, 2)
        if not request:
            for pid in forked:  # their streams are closed, too
                os.waitpid(pid, 0)
            os._exit(0)
        forked.append(os.fork())
        if forked[-1] == 0:
            connection.close()
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            role, mark = request.decode().split()
            _write(_ENVIRONMENT, f"{processes.MARK_NAME}={processes.MARK}", f"{processes.MARK_NAME}={mark}")
            if role == "scripts":
                _write(_ARGUMENTS, _OF_ENGINES, "")
                gc.enable()
                return warm_python.next_script()
            from tests.support import warm_engines

            warm_engines.serve()
        for stream in streams:
            os.close(stream)


_loaded: dict[str, ModuleType] = {}


def _keep_modules() -> None:
    """Leave the base's modules in memory when a forked process ends: to free them, it would copy all of them first.

    Tests of a process's end set DISTNB_TEST_WHOLE_END, and Python frees everything.
    """
    if "DISTNB_TEST_WHOLE_END" not in os.environ:
        names = _loaded.keys() - {"sys", "builtins", "__main__"}
        kept = _loaded, sys.meta_path[:], [sys.modules.pop(name, None) for name in names]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _write(area: tuple[int, int], old: str, new: str) -> None:
    """Replace a text in the arguments or the environment of this process's start, which /proc shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fields[number]) for number in area)
    place = ctypes.string_at(begin, end - begin).index(old.encode() + b"\0")
    written = new.encode().ljust(len(old), b"\0") + b"\0"
    ctypes.memmove(begin + place, written, len(written))
