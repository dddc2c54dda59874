"""Clusters for the tests, with a replacement agent."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from distnb.cluster.connection import Connection, make_keys
from distnb.cluster.devices import plan_devices
from distnb.cluster.lifecycle import Cluster

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


def make_cluster(n: int, **options: Any) -> Cluster:
    keys, name = make_keys(), str(len(_clusters))
    connection = Connection(
        program_url=f"unix://{_listener()}/{name}",  # for the plain agent only
        control_url="tcp://127.0.0.1:1",
        server_public=keys.server_public,
        client_public=keys.client_public,
        client_secret=keys.client_secret,
        notebook_pid=os.getpid(),
    )
    cluster = _clusters[name] = Cluster(plan_devices(n, gpus=0), connection, **{"agent": AGENT, **options})
    return cluster


@contextlib.contextmanager
def running_cluster(n: int, **options: Any) -> Iterator[Cluster]:
    cluster = make_cluster(n, **options)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
