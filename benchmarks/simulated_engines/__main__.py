"""A process with simulated engines: `python -m benchmarks.simulated_engines CONNECTION_FILE`.

Standard input has its engines, as a list of (number, name of the machine) in JSON.
"""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import zmq

from benchmarks.simulated_engines.engine import SimulatedEngine
from distnb.cluster.connection import Connection
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.local.orphans import die_with
from distnb.wire import channel, unix_socket

_SOCKETS_PER_ENGINE = 2


class _OfTorch:
    """An object of torch in a message: a mode such as the default dtype, which a simulated replica ignores."""

    def __init__(self, *args: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """An unpickler of messages, which replaces the objects of torch."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or a function by its name."""
        return _OfTorch if module.partition(".")[0] == "torch" else super().find_class(module, name)


def _decode(frames: Sequence[Any]) -> Any:
    return _Unpickler(io.BytesIO(frames[0]), buffers=frames[1:]).load()


class _WithoutTorch:
    """A finder that lets no code of this process import torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise ImportError for torch."""
        if name == "torch":
            raise ImportError("Simulated engines do without torch.")


async def _serve(engines: list[tuple[int, str]], connection: Connection) -> None:
    context: zmq.Context[Any] = zmq.Context()
    context.max_sockets = _SOCKETS_PER_ENGINE * len(engines) + 1
    serving = [SimulatedEngine(engine, machine, connection, context).serve() for engine, machine in engines]
    await asyncio.gather(*serving)


def main() -> None:
    """Serve until the notebook ends."""
    sys.meta_path.insert(0, _WithoutTorch())
    vars(channel)["decode"] = vars(unix_socket)["decode"] = _decode
    connection = Connection.read(sys.argv[1])
    die_with(connection.notebook_pid)
    engines = [(engine, machine) for engine, machine in json.load(sys.stdin)]
    raise_file_limit(len(engines))
    asyncio.run(_serve(engines, connection))


if __name__ == "__main__":
    main()
