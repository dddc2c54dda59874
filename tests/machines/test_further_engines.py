"""The places of engines that a running cluster gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distnb.cluster import engine_plan
from distnb.cluster.engine_plan import EnginePlan
from distnb.cluster.local.capacity import Capacity
from distnb.cluster.local.launcher import PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.cluster.start_options import StartOptions
from distnb.errors import StartError
from distnb.machines.agents.machine_launcher import MachineLinks
from distnb.machines.host_plan import HostOptions, HostPlan
from distnb.machines.transport import Found, Transport
from distnb.topology import PS, WORKER, Device, Task

ROOM = Capacity(cores=4, memory_nbytes=2**40)


class FakeTransport(Transport):
    """A transport to machines that have the same capacity."""

    def __init__(self, new: Sequence[str] = ()) -> None:
        self.new = tuple(new)
        self.released: list[str] = []

    def command(self, host: str) -> list[str]:
        return []

    def network_name(self, host: str) -> str:
        return host

    def unreached(self, host: str, status: int) -> str:
        return ""

    def further_hosts(self, count: int) -> tuple[str, ...]:
        return self.new[:count]

    def release(self, host: str) -> None:
        self.released.append(host)


def placed(*places: tuple[str, str], tasks: Sequence[Task] = ()) -> list[PlacedEngine]:
    return [
        PlacedEngine(
            engine=engine,
            device=Device(kind.partition(":")[0], int(kind.partition(":")[2])),
            host=host,
            task=tasks[engine] if tasks else None,
        )
        for engine, (host, kind) in enumerate(places)
    ]


def plan(
    there: Sequence[PlacedEngine], transport: FakeTransport | None = None, *, given: Any = None, **machines: Any
) -> EnginePlan:
    hosts = tuple(dict.fromkeys(each.host for each in there))
    words: dict[str, Any] = {
        "engines": tuple(there),
        "options": StartOptions(**(given or {})),
    }
    if transport is None:
        return EnginePlan(**words)
    words["machines"] = HostOptions(hosts=hosts, **machines)
    processes = Processes()
    processes.close()
    return HostPlan(links=MachineLinks(transport, processes), **words)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the number of GPUs of each machine, 0 by default. Machines answer at once."""
    counts: dict[str, int] = {}

    def answers(links: MachineLinks, hosts: Sequence[str], *_: Any) -> Mapping[str, Found]:
        return {host: Found(counts.get(host, 0), ROOM, {}) for host in hosts}

    monkeypatch.setattr(MachineLinks, "open", answers)
    monkeypatch.setattr(engine_plan, "this_machine", lambda: ROOM)
    return counts


def places(found: Sequence[PlacedEngine]) -> list[tuple[int, str, str]]:
    return [(each.engine, each.host, str(each.device)) for each in found]


def test_free_numbers_and_devices_are_used_first(gpus: dict[str, int]) -> None:
    there = [each for each in placed(("", "cpu:0"), ("", "cpu:1"), ("", "cpu:2")) if each.engine != 1]
    found, notices = plan(there).place_further(there, 3)
    assert places(found) == [(1, "", "cpu:1"), (3, "", "cpu:3"), (4, "", "cpu:4")]
    assert notices == (
        "5 engines share the 4 cores of this machine. More engines than cores do not make a program faster.",
    )


def test_each_new_engine_runs_where_the_fewest_are(gpus: dict[str, int]) -> None:
    there = placed(("a", "cpu:0"), ("a", "cpu:1"), ("b", "cpu:0"))
    found, _ = plan(there, FakeTransport()).place_further(there, 3)
    assert places(found) == [(3, "b", "cpu:1"), (4, "a", "cpu:2"), (5, "b", "cpu:2")]


def test_engines_on_gpus_get_one_each(gpus: dict[str, int]) -> None:
    gpus.update(a=2, b=4)
    there = placed(("a", "cuda:0"), ("b", "cuda:1"))
    found, _ = plan(there, FakeTransport()).place_further(there, 4)
    assert places(found) == [(2, "a", "cuda:1"), (3, "b", "cuda:0"), (4, "b", "cuda:2"), (5, "b", "cuda:3")]
    with pytest.raises(StartError, match="a: 2 further engines need 2 free devices of type cuda, but 1 of 2 is free"):
        plan(there, FakeTransport()).place_further(there, 5)
    shared, _ = plan(there, FakeTransport(), given={"oversubscribe": True}).place_further(there, 5)
    assert [str(each.device) for each in shared if each.host == "a"] == ["cuda:1", "cuda:0"]  # b is full, too


def test_workers_go_to_the_machines_in_turn(gpus: dict[str, int]) -> None:
    tasks = [Task(WORKER, 0), Task(WORKER, 0), Task(PS, 0)]
    there = placed(("a", "cpu:0"), ("a", "cpu:1"), ("b", "cpu:0"), tasks=tasks)
    found, _ = plan(there, FakeTransport(), replicas=2).place_further(there, 2)
    assert places(found) == [(3, "b", "cpu:0"), (4, "b", "cpu:1"), (5, "a", "cpu:2"), (6, "a", "cpu:3")]
    assert [str(each.task) for each in found] == ["worker 1", "worker 1", "worker 2", "worker 2"]


def test_reserved_hosts_are_released_if_they_do_not_suffice(
    gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, transport = placed(("r0", "cuda:0")), FakeTransport(["r1", "r2"])
    found, _ = plan(there, transport).place_further(there, 2)
    assert places(found) == [(1, "r1", "cpu:0"), (2, "r2", "cpu:0")]
    monkeypatch.setattr(engine_plan, "check_capacity", lambda *_, **__: (_ for _ in ()).throw(StartError("full")))
    with pytest.raises(StartError, match="r1: full"):
        plan(there, transport).place_further(there, 2)
    assert sorted(transport.released) == ["r1", "r2"]


def test_tpu_chips_cannot_be_added(gpus: dict[str, int]) -> None:
    there = placed(("", "tpu:0"))
    with pytest.raises(StartError, match="TPU chips cannot be resized"):
        plan(there).place_further(there, 1)
