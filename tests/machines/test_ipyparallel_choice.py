"""The choice among the engines of an ipyparallel cluster, by their machines and GPUs. The cluster is simulated."""

from __future__ import annotations

import contextlib
import platform
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import distnb
from distnb.cluster.local.capacity import Capacity
from distnb.cluster.local.processes import Processes
from distnb.cluster.start_options import StartOptions
from distnb.errors import OptionError, StartError
from distnb.machines.agents.machine_launcher import MachineLinks
from distnb.machines.host_plan import HostPlan
from distnb.machines.transport import Found
from distnb.machines.transports import ipyparallel_cluster
from distnb.machines.transports.ipyparallel_cluster import IPythonParallel
from distnb.machines.transports.ipyparallel_engine import network


class Result:
    """The result of a request, which is there at once."""

    def __init__(self, value: object) -> None:
        self._value = value

    def ready(self) -> bool:
        return True

    def get(self) -> object:
        return self._value


class SimulatedCluster:
    """A client of engines that are described by (machine, GPUs). Each of their servers is a port of this process."""

    def __init__(self, engines: dict[int, tuple[str, tuple[str, ...]]]) -> None:
        self.engines = engines
        self._ports: dict[int, socket.socket] = {}
        self._chosen = 0

    @property
    def ids(self) -> list[int]:
        return list(self.engines)

    def __getitem__(self, engine: int) -> SimulatedCluster:
        self._chosen = engine
        return self

    def apply_async(self, function: object, text: str, values: object) -> Result:
        machine, gpus = self.engines[self._chosen]
        if "start_server" in text:
            port = self._ports[self._chosen] = socket.create_server(("127.0.0.1", 0))
            return Result({"address": f"127.0.0.1:{port.getsockname()[1]}", "key": "k" * 40})
        here = {"network": f"{network()} {machine}" if machine else network()}
        versions = {"distnb": distnb.__version__, "python": platform.python_version()}
        return Result({**versions, **here, "host": machine or "here", "address": "127.0.0.1", "gpus": gpus})

    def end(self, *engines: int) -> None:
        """End engines, and with them their servers."""
        for engine in engines:
            del self.engines[engine]
            if engine in self._ports:
                self._ports.pop(engine).close()

    def close(self) -> None:
        for port in self._ports.values():
            port.close()


@contextlib.contextmanager
def planned(
    monkeypatch: pytest.MonkeyPatch, engines: dict[int, tuple[str, tuple[str, ...]]], **options: Any
) -> Iterator[tuple[HostPlan, SimulatedCluster]]:
    """Plan a cluster of distnb on a simulated cluster of ipyparallel."""
    simulated = SimulatedCluster(engines)
    connected = contextlib.nullcontext(simulated)
    monkeypatch.setattr(ipyparallel_cluster, "connected", lambda cluster: connected)
    # An address of every machine, which represents one on a network.
    monkeypatch.setattr(ipyparallel_cluster, "listening_address", lambda hosts, interface: "127.0.0.2")
    monkeypatch.setattr(ipyparallel_cluster, "is_loopback", "127.0.0.1".__eq__)
    room = Capacity(cores=16, memory_nbytes=2**40)

    def answers(links: Any, hosts: Any, on_progress: object) -> dict[str, Found]:
        return {host: Found(len(links.transport._servers[host].machine.gpus), room, {}) for host in hosts}

    monkeypatch.setattr(MachineLinks, "open", answers)
    on = IPythonParallel("simulated")
    given = StartOptions(on=on, **options)
    plan, processes = None, Processes()
    try:
        plan = on.planner(given)(given, processes, lambda text: None)
        yield plan, simulated
    finally:
        simulated.close()
        if plan is not None:
            plan.close()
        processes.close()


def devices_of(plan: HostPlan) -> list[str]:
    return [str(each.device) for each in plan.engines]


TWO = ("GPU-1", "GPU-2")


def test_engines_of_one_machine_get_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {0: ("a", TWO), 1: ("b", TWO), 2: ("a", TWO), 3: ("b", TWO)}
    with planned(monkeypatch, engines) as (plan, _):
        assert devices_of(plan) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    with planned(monkeypatch, engines, n=2) as (plan, _):
        assert devices_of(plan) == ["cuda:0", "cuda:0"]
    with planned(monkeypatch, engines, workers=3, ps=1) as (plan, _):
        assert devices_of(plan) == ["cuda:0", "cuda:0", "cuda:1", "cpu:0"]
    too_many = pytest.raises(StartError, match=r"^a \(GPU-1\): 2 engines were asked for but this machine has 1 GPU")
    with too_many, planned(monkeypatch, {0: ("a", ("GPU-1",)), 1: ("a", ("GPU-1",))}):
        pass


def test_a_batch_system_gives_each_engine_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under Slurm, each of them is GPU 0 in its own job.
    with planned(monkeypatch, {0: ("a", ("GPU-1",)), 1: ("a", ("GPU-2",))}) as (plan, _):
        assert devices_of(plan) == ["cuda:0", "cuda:0"]
        assert [plan.links.transport.machine(each.host) for each in plan.engines] == ["a (GPU-1)", "a (GPU-2)"]
    unclear = pytest.raises(StartError, match="engines 0 and 1 on a have GPUs in common, but see different lists")
    with unclear, planned(monkeypatch, {0: ("a", TWO), 1: ("a", ("GPU-2",))}):
        pass


def replaced(plan: HostPlan, *hosts: str) -> list[int]:
    """Restart hosts, and return the numbers of their ipyparallel engines."""
    plan.links.transport.prepare(hosts, lambda text: None)
    return [plan.links.transport._servers[host].engine for host in hosts]


def test_a_replacement_does_not_use_a_gpu_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {0: ("a", TWO), 1: ("a", TWO), 2: ("b", TWO)}
    with planned(monkeypatch, engines) as (plan, simulated):
        simulated.end(2)  # cuda:0, which is in use on a
        simulated.engines[3] = ("a", TWO)
        with pytest.raises(
            StartError, match="engine 2 on b has ended, and the cluster has no other engine, or none wit"
        ):
            replaced(plan, "ipyparallel-2")
        simulated.engines[4] = ("c", ("GPU-1",))  # too few
        with pytest.raises(StartError, match="none with a free GPU"):
            replaced(plan, "ipyparallel-2")
        simulated.engines[5] = ("d", TWO)
        assert replaced(plan, "ipyparallel-2") == [5]
        simulated.end(0, 1)
        simulated.engines |= {6: ("e", TWO), 7: ("e", TWO)}
        assert replaced(plan, "ipyparallel-0", "ipyparallel-1") == [3, 6]


def test_a_replacement_on_the_cpu_may_be_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch, {0: ("a", ()), 1: ("b", ())}) as (plan, simulated):
        assert replaced(plan, "ipyparallel-0", "ipyparallel-1") == [0, 1]  # their servers still listen
        simulated.end(0)
        with pytest.raises(StartError, match="engine 0 on a has ended, and the cluster has no other engine"):
            replaced(plan, "ipyparallel-0")
        simulated.engines |= {4: ("b", ()), 5: ("b", ())}
        assert replaced(plan, "ipyparallel-0") == [4]
        assert replaced(plan, "ipyparallel-2") == [5]  # a further host


def test_a_cluster_of_this_machine_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch, {0: ("", ())}) as (plan, simulated):
        assert plan.links.transport._lease[0] == "127.0.0.1"
        simulated.end(0)
        simulated.engines[1] = ("a", ())
        with pytest.raises(StartError, match="This cluster listens on loopback only"):
            replaced(plan, "ipyparallel-0")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: IPythonParallel(wait=-1), "wait=-1: give a number of seconds, 0 or more"),
        (lambda: IPythonParallel(7), "cluster=7 is not an ipyparallel cluster. Give an ipyparallel.Cluster or Client"),
    ],
)
def test_an_invalid_cluster_is_refused(make: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"workers": 1, "ps": 1, "replicas_per_worker": 2}, "replicas_per_worker=2 does not apply"),
        ({"n": -1}, "n=-1: give a whole number, 1 or more"),
    ],
)
def test_bad_options_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        IPythonParallel().planner(StartOptions(**given))
