"""`python -m distnb.engine`: one engine process. The cluster starts it, and tells it all in its environment."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from distnb.accelerators import use
from distnb.cluster.connection import CONNECTION_VARIABLE, Connection, remove_run_directory
from distnb.cluster.orphans import die_with
from distnb.cluster.surroundings import (
    AGENT_VARIABLE,
    DEVICE_VARIABLE,
    ENGINE_VARIABLE,
    REPLACES_VARIABLE,
    THREADS_VARIABLE,
    keep_temporary_sockets_in,
)
from distnb.cluster.watcher import report
from distnb.topology import parse_device

__all__ = ["IN_COMMON", "main"]

IN_COMMON = (
    "argparse",
    "asyncio",
    "calendar",
    "concurrent.futures.thread",
    "csv",
    "ctypes",
    "glob",
    "hashlib",
    "importlib.metadata",
    "importlib.resources",
    "numbers",
    "pprint",
    "pwd",
    "queue",
    "typing_extensions",
    "unicodedata",
    "uuid",
)
"""Of what both torch and ipykernel import all that is not loaded yet, with what these import."""


def main() -> None:
    """Become an engine, until the notebook says otherwise or is gone."""
    path = Path(os.environ[CONNECTION_VARIABLE])
    engine = int(os.environ[ENGINE_VARIABLE])
    device = parse_device(os.environ[DEVICE_VARIABLE])
    connection = Connection.read(path)
    if os.getpgid(0) != os.getpid():
        os.setsid()  # a terminal's Ctrl-C is for the notebook; and what ends with us is exactly our group
    die_with(connection.notebook_pid, first=lambda: remove_run_directory(path.parent))
    keep_temporary_sockets_in(path.parent)
    log = os.fdopen(os.dup(2), "w")
    loading = _Loading(os.environ.get(AGENT_VARIABLE, "distnb.engine.agent"))
    # ipykernel and IPython load beside torch: reading files and linking libraries leave time for each other.
    from distnb.engine.app import EngineApp

    app = EngineApp.instance(id=engine)
    app.initialize([f"--profile-dir={path.parent}", "--log-level=WARN"])
    app.joins = connection.controller
    app.replaces = REPLACES_VARIABLE in os.environ

    def prepare(shell: Any) -> None:
        agent = loading.finish()
        use(device)
        agent.install(shell, connection, engine, device)
        report(path.parent, engine)

    app.prepare = prepare
    code = 0
    try:
        app.start()
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001  # by now sys.stderr leads to clients, and this must be in the log
        print(traceback.format_exc(), file=log, flush=True)
        code = 1
    _leave(code)


class _Loading:
    """torch, imported by a thread of its own, and the agent that needs it.

    Two threads that import what imports each other find modules half-made, and fail. So what torch and ipykernel have
    in common is imported first, and what needs both last: the thread and the main thread never load the same.
    """

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._error: BaseException | None = None
        for name in IN_COMMON:
            importlib.import_module(name)
        self._thread = threading.Thread(target=self._load, name="distnb-import-torch", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        try:
            import torch
            import torch.distributed

            torch.set_num_threads(int(os.environ.get(THREADS_VARIABLE, "1")))
        except BaseException as error:  # noqa: BLE001  # raised in the main thread
            self._error = error

    def finish(self) -> Any:
        """Wait until torch is there, and return the agent's module. Raises what an import raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return importlib.import_module(self._agent)


def _leave(code: int) -> None:
    """End the process: exit functions run (they end DataLoader workers), threads of the user are not waited for."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
