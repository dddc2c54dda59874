"""The server next to an ipyparallel engine, and the functions that the notebook calls in that engine.

`describe` reports the engine's machine, and `start_server` starts this module as a program. That process runs a
`Server`, as `distnb worker` does:

    ipyparallel engine ── starts ──▶ server ──▶ machine agent ──▶ distnb's engine
                                       └── stays connected to the notebook

The server is a process of its own, so the ipyparallel engine remains free for its user. It ends with the ipyparallel
engine, and with its connection to the notebook. Its request is a line on its standard input, and its answer a line on
its standard output. Both also travel on ipyparallel's channel, which by default signs messages without encrypting them.
So they contain public keys only, and the secret keys never leave the two ends:

    {"client": "…", "lease": "…", "url": "tcp://10.0.0.1:40123", "notebook": "10.0.0.1", "engine": 4711}
    {"address": "10.0.0.2:35791", "key": "…"}         or {"error": "…"}
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from distnb import __version__
from distnb.cluster.devices import gpu_ids
from distnb.cluster.network import address_towards
from distnb.cluster.process_environment import PYTHON_MODULE, import_environment
from distnb.errors import StartError

__all__ = ["ENGINE_ENDED", "describe", "main", "network", "start_server"]

ENGINE_ENDED = "its ipyparallel engine has ended"
"""The reason that the server reports when it ends with the ipyparallel engine."""

_ANSWER_S = 60.0  # the server imports distnb, and waits up to 30 s for a connection to the notebook
_OUTPUT_CHARS = 1000


# -- in the ipyparallel engine -----------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Return the facts about this ipyparallel engine and its machine: the attributes of `EngineMachine`.

    Its address is the one from which it reaches ipyparallel's controller.
    """
    from ipyparallel.engine.app import IPEngine

    url = str(IPEngine.instance().registration_url)
    controller = url.removeprefix("tcp://").rpartition(":")[0] if url.startswith("tcp://") else "127.0.0.1"
    return {
        "distnb": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "network": network(),
        "address": address_towards(controller),
        "gpus": gpu_ids(),
    }


def network() -> str:
    """Return the identifier of this machine since its start, and of this process's network on it.

    Each Kubernetes pod has another network.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")


def start_server(request: dict[str, Any]) -> dict[str, str]:
    """Start a server as a child of this ipyparallel engine, and return its answer.

    Errors are returned, because ipyparallel would send the traceback of an exception to all clients.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("IPP_")}
    try:
        process = subprocess.Popen(
            [*PYTHON_MODULE, __name__],
            env=own | import_environment(),  # without ipyparallel's connection: distnb's engines are not of its cluster
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return {"error": f"The server's process could not be started: {error}."}
    threading.Thread(target=process.wait, name="distnb-server", daemon=True).start()  # leaves no zombie
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps({**request, "engine": os.getpid()}).encode() + b"\n")
            process.stdin.flush()
        answered = bool(select.select([process.stdout], [], [], _ANSWER_S)[0])
        line = process.stdout.readline() if answered else b""
        if line:
            return dict(json.loads(line))
        process.kill()
        output = process.stderr.read().decode(errors="replace").strip()[-_OUTPUT_CHARS:]
    how = "ended at once" if answered else f"did not answer within {_ANSWER_S:.0f} s"
    return {"error": f"The server's process {how}. Its output: {output or '(nothing)'}"}


# -- the server --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer the request on standard input, and serve until the notebook or the ipyparallel engine ends."""
    request = json.loads(sys.stdin.readline())
    try:
        _serve(request)
    except StartError as error:
        _answer({"error": str(error)})


def _serve(request: dict[str, Any]) -> None:
    from distnb.cluster.connection import Keys, make_keys
    from distnb.cluster.local.orphans import at_end_of
    from distnb.machines.agents.heartbeat import heartbeat
    from distnb.machines.engine_server import Server

    keys = replace(make_keys(), client_public=request["client"], client_secret="")
    own = address_towards(request["notebook"])
    address = f"[{own}]:0" if ":" in own else f"{own}:0"
    server = Server({"worker": [address]}, "worker", 0, secret=keys)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: server.stop(f"ended by {signal.Signals(number).name}"))
    lease = Keys(
        server_public=request["lease"],
        server_secret="",
        client_public=keys.server_public,
        client_secret=keys.server_secret,
    )
    try:
        with heartbeat(request["url"], lease, server.stop):
            at_end_of(request["engine"], lambda: server.stop(ENGINE_ENDED))
            _answer({"address": server.address, "key": keys.server_public})
            server.join()
    finally:
        server.stop()


def _answer(answer: dict[str, str]) -> None:
    """Write the answer, and close the streams, which the ipyparallel engine no longer reads."""
    os.write(1, json.dumps(answer).encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


if __name__ == "__main__":
    main()
