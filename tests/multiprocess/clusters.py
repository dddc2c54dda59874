"""Clusters for the tests, with the stand-in agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from distnb.cluster.connection import Connection, make_keys
from distnb.cluster.devices import plan_devices
from distnb.cluster.lifecycle import Cluster

AGENT = "tests.multiprocess.plain_agent"


def make_connection() -> Connection:
    keys = make_keys()
    return Connection(
        program_url="tcp://127.0.0.1:1",
        control_url="tcp://127.0.0.1:1",
        server_public=keys.server_public,
        client_public=keys.client_public,
        client_secret=keys.client_secret,
        notebook_pid=os.getpid(),
    )


def make_cluster(n: int, **options: Any) -> Cluster:
    return Cluster(plan_devices(n, gpus=0), make_connection(), **{"agent": AGENT, **options})


@contextlib.contextmanager
def running_cluster(n: int, **options: Any) -> Iterator[Cluster]:
    cluster = make_cluster(n, **options)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
