"""A replacement for the agent where only processes matter. DISTNB_TEST_BEHAVIOUR (`WHAT[:ENGINE]`) adds faults."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

_KEPT: list[Any] = []


def install(shell: Any, connection: Any, engine: int, device: Any) -> None:
    shell.user_ns["engine"] = engine
    shell.user_ns["device"] = str(device)
    what, _, which = os.environ.get("DISTNB_TEST_BEHAVIOUR", "").partition(":")
    if not which or int(which) == engine:
        _misbehave(what)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notebook:
        listener, _, cluster = connection.program_url.removeprefix("unix://").partition("/")
        notebook.sendto(f"{cluster} {engine}".encode(), f"\0{listener}")


def _misbehave(what: str) -> None:
    if what == "raise":
        raise RuntimeError("the flux capacitor is missing")
    if what == "exit":
        os._exit(3)
    if what == "stall":
        time.sleep(1000)
    if what == "workers":
        _start_workers()
    if what == "gil":
        import asyncio

        asyncio.get_running_loop().call_later(0.2, lambda: sum(range(10**12)))  # holds the interpreter lock for hours


def _start_workers() -> None:
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(1000), batch_size=1, num_workers=2))  # type: ignore[arg-type]
    next(batches)
    _KEPT.append(batches)
