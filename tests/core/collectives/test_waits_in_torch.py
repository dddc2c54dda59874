"""Stop ends every wait of a replica inside torch, also if Gloo's connections do not end the operation."""

from __future__ import annotations

import pytest

from tests.support import processes
from tests.support.collective_traffic import STEPS, preparation
from tests.support.kernel import Notebook

pytestmark = pytest.mark.processes

LIMIT_S = 45.0
NEXT = """%%distribute mirrored
import torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
print("sum:", int(total))
"""


def stopped(notebook: Notebook, source: str) -> None:
    """Run a cell, and press stop when it has written "ready". Check that the next cell works."""
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready", timeout_s=LIMIT_S)
    notebook.interrupt()
    ran = notebook.finish(message, source, timeout_s=LIMIT_S)
    assert ran.error_name == "KeyboardInterrupt", ran
    # On a slow machine, replicas may end a little later.
    processes.wait_until(lambda: "busy" not in notebook.run("%distnb status").text, LIMIT_S, "a replica is stuck")
    assert "sum: 2" in notebook.run(NEXT).stdout


# Rarely, Gloo forgets a pending operation when its sockets are closed. Here, it forgets each.
FORGETFUL = """
from distnb.collectives.group.gloo_sockets import Connections
shut_down, Connections.shut_down = Connections.shut_down, lambda self: None
"""


@pytest.mark.parametrize(
    "step",
    [
        "all_reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor, coalesced",
        "send and recv",
    ],
)
def test_collectives_are_not_waited_for_in_c(notebook: Notebook, step: str) -> None:
    source = f"""%%distribute mirrored
{preparation(STEPS[step], 10)}
{STEPS[step]}
{FORGETFUL}
try:
    print("ready", flush=True)
    if rank == 0:
        import time
        time.sleep(600)
    {STEPS[step]}
finally:
    Connections.shut_down = shut_down
"""
    stopped(notebook, source)


@pytest.mark.parametrize(
    "wait",
    [
        "dist.distributed_c10d._get_default_store().get('missing')",
        "dist.TCPStore('127.0.0.1', silent.getsockname()[1])",
        "dist.TCPStore('127.0.0.1', 0, world_size=2, is_master=True)",
        "dist.HashStore().wait(['missing'])",
    ],
)
def test_stores_are_not_waited_for_in_c(notebook: Notebook, wait: str) -> None:
    source = f"""%%distribute mirrored
import socket, torch.distributed as dist
with socket.socket() as silent:
    silent.bind(("127.0.0.1", 0))
    print("ready", flush=True)
    {wait}
"""
    stopped(notebook, source)


def test_a_store_without_a_server_is_an_error_at_once(notebook: Notebook) -> None:
    # torch.distributed.debug.start_debug_server() first does this on every replica.
    ran = notebook.try_run(
        "%%distribute mirrored\nfrom torch.distributed.debug._store import tcpstore_client\ntcpstore_client()",
        timeout_s=LIMIT_S,
    )
    assert ran.error_name == "CollectiveError", ran
    assert "MASTER_PORT" in ran.error_text
    assert "is_master=" in ran.error_text
    notebook.run("""%%distribute mirrored
import os, torch.distributed as dist
from torch.distributed.debug._store import tcpstore_client
store = dist.TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=dist.get_rank() == 0, wait_for_workers=False
)
tcpstore_client().set(str(dist.get_rank()), "here")
assert tcpstore_client().get("1") == b"here"
""")
    notebook.run("%%distribute mirrored\nstore = None")  # the store listens on every interface


def test_a_store_answers_as_before(notebook: Notebook) -> None:
    notebook.run("""%%distribute mirrored
import datetime, torch.distributed as dist
store = dist.PrefixStore("mine", dist.HashStore())
store.set("key", "1")
assert store.get("key") == b"1"
assert store.multi_get(["key", "key"]) == [b"1", b"1"]
store.wait(["key"])
try:
    store.wait(["key", "other"], datetime.timedelta(seconds=0.2))
except dist.DistStoreError as error:
    assert "200ms" in str(error) and "other" in str(error) and "key'" not in str(error).split("keys:")[1]
else:
    raise AssertionError("it ended")
""")
