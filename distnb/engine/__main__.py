"""`python -m distnb.engine`: one engine process, with its settings in environment variables.

If the environment names no engine, the process forks the engines, and each of them continues here.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from distnb.accelerators import use
from distnb.cluster.connection import CONNECTION_VARIABLE, Connection
from distnb.cluster.local.orphans import die_with
from distnb.cluster.process_environment import (
    AGENT_VARIABLE,
    DEVICE_VARIABLE,
    ENGINE_VARIABLE,
    THREADS_VARIABLE,
    keep_temporary_sockets_in,
)
from distnb.engine.template import fork_engines, load
from distnb.objects.memory.freed_memory import keep_freed_memory
from distnb.process_log import open_log
from distnb.topology import parse_device

__all__ = ["main"]


def main() -> None:
    """Run an engine until the notebook stops it or ends."""
    if ENGINE_VARIABLE not in os.environ:
        fork_engines()
    path = Path(os.environ[CONNECTION_VARIABLE])
    engine = int(os.environ[ENGINE_VARIABLE])
    device = parse_device(os.environ[DEVICE_VARIABLE])
    connection = Connection.read(path)
    if os.getpgid(0) != os.getpid():
        os.setsid()  # a terminal's Ctrl-C is for the notebook, and our group is exactly the processes that end with us
    die_with(connection.notebook_pid)
    keep_temporary_sockets_in(path.parent)
    open_log(path.parent, f"engine-{engine}")
    log = os.fdopen(os.dup(2), "w")
    keep_freed_memory()
    load()
    import torch

    from distnb.engine.app import EngineApp

    torch.set_num_threads(int(os.environ[THREADS_VARIABLE]))
    agent = importlib.import_module(os.environ[AGENT_VARIABLE])
    app = EngineApp.instance(id=engine)
    app.initialize([f"--profile-dir={path.parent}", "--log-level=ERROR"])
    app.joins = connection.controller

    def prepare(shell: Any) -> None:
        use(device)
        agent.install(shell, connection, engine, device)

    app.prepare = prepare
    code = 0
    try:
        app.start()
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001  # sys.stderr now leads to clients, and the traceback must be in the log
        print(traceback.format_exc(), file=log, flush=True)
        code = 1
    _leave(code)


def _leave(code: int) -> None:
    """End the process after its exit functions, which end DataLoader workers. Do not wait for the user's threads."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
