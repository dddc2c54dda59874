"""Clusters for the tests, with a replacement agent."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from distnb.cluster.devices import plan_devices
from distnb.cluster.engine_owner import OnExit
from distnb.cluster.engine_plan import EnginePlan
from distnb.cluster.lifecycle import Cluster
from distnb.cluster.local.launcher import PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.wire.channel import Addresses

AGENT = "tests.support.plain_agent"
_clusters: dict[str, Cluster] = {}


@functools.cache
def _listener() -> str:
    """Return the abstract socket through which replacement agents report their cluster and engine."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"plain-agents-{uuid.uuid4().hex}"
    listener.bind(f"\0{name}")

    def receive() -> None:
        while True:
            name, engine = listener.recv(1 << 10).decode().split()
            _clusters[name].engine_ready(int(engine))

    threading.Thread(target=receive, daemon=True).start()
    return name


def make_cluster(n: int, *, agent: str = AGENT, on_exit: OnExit = lambda engine, pid, status: None) -> Any:
    """Return a cluster that `start` starts without an address."""
    devices = plan_devices(n, gpus=0)
    plan = EnginePlan(tuple(PlacedEngine(engine, device) for engine, device in enumerate(devices)))
    name = str(len(_clusters))
    cluster = _clusters[name] = Cluster(plan, Processes(), agent=agent)
    cluster.on_exit = on_exit
    addresses = Addresses(f"unix://{_listener()}/{name}", "tcp://127.0.0.1:1")  # for the plain agent only
    cluster.start = functools.partial(cluster.start, addresses)  # type: ignore[method-assign]
    return cluster


@contextlib.contextmanager
def running_cluster(n: int, **options: Any) -> Iterator[Cluster]:
    cluster = make_cluster(n, **options)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
