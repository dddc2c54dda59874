"""MultiWorkerMirroredStrategy without other processes: its arguments, its place in a cluster, and the meeting."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from typing import Any

import psutil
import pytest
import torch

import distnb
from distnb import CommunicationImplementation, CommunicationOptions, errors
from distnb.cluster.worker_placement import WorkerPlacement, own_interface, placement_of, split_address
from distnb.cluster_resolver import SimpleClusterResolver

TWO = {"worker": ["localhost:12345", "localhost:23456"]}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CONFIG", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def place(cluster: Any, kind: str | None = "worker", index: int | None = 0) -> WorkerPlacement | None:
    return placement_of(SimpleClusterResolver(cluster, task_type=kind, task_id=index))


# -- communication options --------------------------------------------------------------------------------------------


def test_communication_options_are_kept():
    assert CommunicationOptions() == CommunicationOptions(0, None, CommunicationImplementation.AUTO)
    assert CommunicationOptions(50, 2.5, "ring").implementation is CommunicationImplementation.RING
    assert distnb.experimental.CollectiveCommunication.NCCL is CommunicationImplementation.NCCL
    assert distnb.experimental.CommunicationImplementation is CommunicationImplementation
    for name in ("PreemptionCheckpointHandler", "PreemptionWatcher", "TerminationConfig"):
        with pytest.raises(AttributeError, match=r"does not watch for preemption.*CheckpointManager"):
            getattr(distnb.experimental, name)
    assert distnb.experimental.CollectiveHints(bytes_per_pack=50) == CommunicationOptions(50)
    assert pickle.loads(pickle.dumps(CommunicationOptions(1))) == CommunicationOptions(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack=-1"),
        ({"bytes_per_pack": 1.5}, "bytes_per_pack=1.5"),
        ({"timeout_seconds": -1}, "timeout_seconds=-1"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan"),
        ({"implementation": "mpi"}, "'mpi' is not a CommunicationImplementation.*'AUTO', 'RING', 'NCCL'"),
        ({"implementation": None}, "None is not a CommunicationImplementation"),
    ],
)
def test_invalid_communication_options_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(**arguments)


# -- the strategy, alone ----------------------------------------------------------------------------------------------


def test_a_strategy_without_a_cluster_has_one_worker():
    strategy = distnb.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.worker_devices == ("cpu:0",)
    assert strategy.cluster_resolver.task_type is None
    assert not strategy.cluster_resolver.cluster_spec()
    assert distnb.is_chief()
    with strategy.scope():
        weight = torch.nn.Parameter(torch.tensor(1.0))
    assert strategy.run(lambda: weight.item() + 1) == 2


@pytest.mark.parametrize(
    "config",
    [
        {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}},
        {"cluster": {"chief": ["localhost:1"], "ps": ["localhost:2"]}, "task": {"type": "chief", "index": 0}},
        {"cluster": TWO, "task": {"type": "evaluator", "index": 0}},
    ],
)
def test_one_worker_and_an_evaluator_train_separately(config: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = distnb.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.task_type == config["task"]["type"]
    assert distnb.is_chief()
    assert "RANK" not in os.environ


def test_equal_arguments_give_the_same_strategy():
    make = distnb.MultiWorkerMirroredStrategy
    assert distnb.experimental.MultiWorkerMirroredStrategy is make
    assert make() is make(None, CommunicationOptions()) is make("auto")
    assert make(CommunicationImplementation.RING) is make(communication_options="ring") is make(communication="RING")
    assert make(communication_options=CommunicationOptions(5)) is not make()
    resolver = SimpleClusterResolver({})
    assert make(resolver) is make(cluster_resolver=resolver) is make("auto", resolver)
    assert make(resolver).cluster_resolver is resolver
    assert pickle.loads(pickle.dumps(make("ring"))) is make("ring")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"communication_options": "nccl"}, "implementation='NCCL' needs a GPU .* they are on cpu:0"),
        ({"communication_options": "mpi"}, "'mpi' is not a CommunicationImplementation"),
        ({"communication_options": 5}, "5 is neither a ClusterResolver nor"),
        ({"communication_options": "ring", "communication": "ring"}, "are enough"),
        ({"gradient_reduction": "max"}, "'sum' or 'mean'"),
        ({"cluster_resolver": SimpleClusterResolver(TWO)}, "nothing says which of them this process is"),
        ({"cluster_resolver": SimpleClusterResolver({**TWO, "ps": ["c:1"]}, "", "ps", 0)}, "This process is ps 0"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")
def test_unsupported_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        distnb.MultiWorkerMirroredStrategy(**arguments)


# -- the place in the cluster -----------------------------------------------------------------------------------------


def test_ranks_follow_the_task_order_with_the_chief_first():
    found = place({"worker": {3: "c:1", 1: "b:1"}, "ps": ["p:1"], "chief": ["a:1"]}, "worker", 3)
    assert found is not None
    assert [str(worker) for worker in found.workers] == ["chief 0 (a:1)", "worker 1 (b:1)", "worker 3 (c:1)"]
    assert (found.index, found.me.address, found.chief.address) == (2, "c:1", "a:1")
    first = place(TWO, "worker", 0)
    assert first is not None
    assert first.me is first.chief


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, "has 2 chiefs"),
        ({"worker": ["a:1", "a:1"]}, "several tasks the same address, a:1"),
        ({"worker": ["a", "b:1"]}, "'a' is not an address. Write host:port"),
        (
            {"worker": ["a:1"], "wrker": ["b:1"]},
            "the job 'wrker', which is unknown. The jobs are chief, worker, ps",
        ),
        ({"ps": ["a:1"], "evaluator": ["b:1"]}, "no chief and no worker, so no process trains"),
    ],
)
def test_invalid_clusters_are_refused(cluster: Any, message: str):
    with pytest.raises(ValueError, match=message):
        place(cluster)


def test_addresses_are_parsed():
    assert split_address("a.b:80") == ("a.b", 80)
    assert split_address("[::1]:80") == ("::1", 80)
    for wrong in ("a", "a:", ":80", "a:0", "a:65536", "a:x", ""):
        with pytest.raises(ValueError, match="host:port"):
            split_address(wrong)


def test_a_worker_listens_on_the_interface_of_its_address(monkeypatch: pytest.MonkeyPatch):
    def at(*addresses: str) -> tuple[str, str]:
        found = place({"worker": list(addresses)})
        assert found is not None
        return own_interface(found)

    assert at("localhost:1", "127.0.0.1:2") == ("lo", "127.0.0.1")
    assert at("127.0.0.5:1", "localhost:2") == ("lo", "127.0.0.5")
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and name != "lo":
                assert at(f"{address.address}:1", "other.example:2") == (name, address.address)
    with pytest.raises(errors.StartError, match=r"worker 0 \(192.0.2.7:1\).*No network interface"):
        at("192.0.2.7:1", "192.0.2.8:1")
    with pytest.raises(errors.StartError, match=r"'localhost' means .*, where other machines cannot"):
        at("localhost:1", "192.0.2.8:1")
    with pytest.raises(errors.StartError, match="unknown on this machine"):
        at("no-such-host.invalid:1", "b:1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert at("192.0.2.7:1", "192.0.2.8:1") == ("lo", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(errors.StartError, match=r"GLOO_SOCKET_IFNAME: .*no address 'nope0'"):
        at("192.0.2.7:1", "192.0.2.8:1")


# -- the meeting ------------------------------------------------------------------------------------------------------


class Meetings:
    """Replicas that meet, one thread each. `ended` records how."""

    def __init__(self, store: Any = None) -> None:
        self.store = store or torch.distributed.HashStore()
        self.ended: dict[str, BaseException | None] = {}
        self._threads: list[threading.Thread] = []

    def come(self, name: str, cluster: Any, index: int, replicas: int = 1, local: int = 0) -> None:
        from distnb.runtime.scripts.cluster_meeting import meet_workers

        found = place(cluster, "worker", index)
        assert found is not None

        def go() -> None:
            try:
                meet_workers(self.store, found, index * replicas + local, replicas)
                self.ended[name] = None
            except Exception as error:
                self.ended[name] = error

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        self._threads.append(thread)

    def all(self) -> dict[str, BaseException | None]:
        for thread in self._threads:
            thread.join()
        return self.ended


def test_workers_with_the_same_cluster_meet():
    meetings = Meetings()
    for index in (1, 0):
        for local in (0, 1):
            meetings.come(f"{index}/{local}", TWO, index, replicas=2, local=local)
    assert meetings.all() == dict.fromkeys(("0/0", "0/1", "1/0", "1/1"))


def test_different_clusters_are_reported_to_all_workers():
    meetings = Meetings()
    meetings.come("chief", TWO, 0)
    meetings.come("other", {"worker": ["localhost:12345", "localhost:9", "localhost:10"]}, 1)
    ended = meetings.all()
    for error in ended.values():
        assert isinstance(error, errors.OptionError)
        assert "worker 1 (localhost:9) and worker 0 (localhost:12345) describe different clusters" in str(error)
        assert "localhost:23456" in str(error)
        assert "localhost:10" in str(error)


def test_different_numbers_of_replicas_are_reported_to_all_workers():
    meetings = Meetings()
    meetings.come("chief", TWO, 0)
    meetings.come("other", TWO, 1, replicas=2)
    for error in meetings.all().values():
        assert isinstance(error, errors.OptionError)
        assert "worker 1 (localhost:23456) has 2 replica(s), and worker 0 (localhost:12345) has 1" in str(error)


def test_a_second_process_of_a_task_is_refused_and_a_restarted_one_is_not():
    from distnb.runtime.scripts.cluster_meeting import meet_workers

    meetings = Meetings()
    found = place(TWO, "worker", 1)
    assert found is not None
    meetings.store.set("cluster/here/1", "")  # it connected, and was killed
    meetings.come("chief", TWO, 0)
    meetings.come("restarted", TWO, 1)
    assert meetings.all() == {"chief": None, "restarted": None}
    meetings.store.set("cluster/formed/1", "77 on elsewhere/0")
    with pytest.raises(errors.CollectiveError, match=r"Another process is worker 1 .*pid 77 on elsewhere"):
        meet_workers(meetings.store, found, 1, 1)


def test_a_lost_chief_is_reported():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    meetings = Meetings(client)
    meetings.come("worker", TWO, 1)
    del store
    error = meetings.all()["worker"]
    assert isinstance(error, errors.CollectiveError)
    assert "the connection to worker 0 (localhost:12345) was lost" in str(error)
