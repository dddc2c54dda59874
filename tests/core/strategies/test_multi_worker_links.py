"""Workers on separate machines: network namespaces, joined by a link that can be cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.conftest import needs
from tests.support.tasks import Tasks

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(150),
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

LOST_AFTER_S = 4.0
# Each process counts as a machine of its own for shared memory, and the limit for silence is shorter.
BEGIN = f"""
from distnb.collectives.group import gloo_sockets
from distnb.collectives.shared_memory import host
host.identity = lambda: f"machine {{os.getpid()}}"
gloo_sockets.LOST_AFTER_S = {LOST_AFTER_S}
"""


@dataclass
class Machines:
    """Two namespaces, at 10.77.0.1 and 10.77.0.2."""

    ip: str
    names: tuple[str, str]

    def do(self, *words: str) -> None:
        subprocess.run([self.ip, *words], check=True, capture_output=True, timeout=20)

    def command(self, machine: int) -> list[str]:
        return [self.ip, "netns", "exec", self.names[machine], sys.executable, "SCRIPT"]

    def cut(self) -> None:
        self.do("-n", self.names[0], "link", "set", "cable", "down")


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines(needs("ip"), (f"dnb{os.getpid()}a", f"dnb{os.getpid()}b"))
    try:
        made.do("netns", "add", made.names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    try:
        made.do("netns", "add", made.names[1])
        first, second = made.names
        made.do("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for number, name in enumerate(made.names):
            made.do("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            for link in ("lo", "cable"):
                made.do("-n", name, "link", "set", link, "up")
        yield made
    finally:
        for name in made.names:
            subprocess.run([made.ip, "netns", "del", name], check=False, capture_output=True, timeout=20)


def on_both(machines: Machines, program: str) -> Tasks:
    """Run one worker on each machine."""
    names = ["worker 0", "worker 1"]
    commands = {name: machines.command(number) for number, name in enumerate(names)}
    cluster = {"worker": ["10.77.0.1:2222", "10.77.0.2:2222"]}
    return Tasks(program, names, cluster_for=lambda name, made: cluster, command=commands)


@pytest.mark.parametrize("numbers", [3, pytest.param(5_000_000, marks=pytest.mark.soak)])
def test_a_cut_connection_ends_both_workers_within_seconds(machines: Machines, numbers: int):
    program = f"""
strategy = distnb.MultiWorkerMirroredStrategy()
def step():
    return distnb.get_replica_context().all_reduce("sum", torch.ones({numbers}))
assert strategy.local_results(strategy.run(step))[0].sum().item() == 2 * {numbers}
import psutil
report(listening=sorted({{c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}}))
while True:
    strategy.run(step)
"""
    with on_both(machines, BEGIN + program) as tasks:
        for name in tasks.names:
            tasks.wait_for(name, "listening")
        machines.cut()
        ended = [
            tasks.end_of(name, timeout_s=40) for name in tasks.names
        ]  # without distnb they would end after a quarter of an hour
    for number, task in enumerate(ended):
        assert set(task.reported["listening"]) <= {f"10.77.0.{number + 1}"}
        assert "CollectiveError: The connection to another replica was lost" in task.stderr


@pytest.mark.soak
def test_a_suspended_worker_is_waited_for(machines: Machines):
    program = """
strategy = distnb.MultiWorkerMirroredStrategy()
def step():
    return distnb.get_replica_context().all_reduce("sum", torch.ones(5_000_000))
strategy.run(step)
print("ready", flush=True)
while not os.path.exists("go"):  # more is under way than the sockets hold
    strategy.run(step)
    if os.path.exists("last") and distnb.is_chief():
        open("go", "w").close()
os._exit(0)
"""
    with on_both(machines, BEGIN + program) as tasks:
        for name in tasks.names:
            tasks.wait_for(name, "ready")
        tasks.processes["worker 1"].send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LOST_AFTER_S)  # longer than the limit for silence
        tasks.processes["worker 1"].send_signal(signal.SIGCONT)
        (tasks.folder / "last").touch()
        chief = tasks.end_of("worker 0", timeout_s=40)
    assert chief.returncode == 0, chief.stderr
