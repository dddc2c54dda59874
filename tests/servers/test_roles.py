"""Clusters with workers and parameter servers, without engines: tasks, machines and devices."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

import distnb
from distnb.cluster.engine_plan import EnginePlan, plan_on_this_machine
from distnb.cluster.local.capacity import Capacity
from distnb.cluster.local.processes import Processes
from distnb.cluster.resolvers import ClusterSpec, SimpleClusterResolver, SlurmClusterResolver
from distnb.cluster.start_options import StartOptions, tasks_of
from distnb.cluster.worker_placement import server_cluster_tasks, tasks_in
from distnb.errors import NoClusterError, OptionError, StartError
from distnb.machines.agents.machine_launcher import MachineLinks
from distnb.machines.host_plan import HostOptions, HostPlan
from distnb.machines.other_machines import OtherMachines
from distnb.machines.secret import read_secret, secret_path
from distnb.machines.server_client import connect_patience_s
from distnb.machines.transport import Found, Way
from distnb.machines.transports.mpiexec import MPI
from distnb.machines.transports.server_transport import Servers, ServerTransport
from distnb.machines.transports.srun import Slurm
from distnb.machines.transports.ssh import SSH
from distnb.servers.notebook.task_cluster import require
from distnb.topology import Task

W0, W1, W2, PS0, PS1 = Task("worker", 0), Task("worker", 1), Task("worker", 2), Task("ps", 0), Task("ps", 1)
CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "a:2"], "ps": ["b:1"], "evaluator": ["d:1"]}


def hosts_of(on: OtherMachines, **given: Any) -> HostOptions:
    return on.find_hosts(StartOptions(on=on, **given))


def test_counts_make_tasks_with_workers_first() -> None:
    assert tasks_of(2, 1) == (W0, W1, PS0)
    assert tasks_of(None, None) == ()
    assert tasks_of(2, 1, replicas_per_worker=2) == (W0, W0, W1, W1, PS0)
    assert [*map(str, tasks_of(1, 1))] == ["worker 0", "ps 0"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"workers": 2}, "workers=2 and ps=None.* --workers 2 --ps 1"),
        ({"ps": 2}, "workers=None and ps=2"),
        ({"workers": 0, "ps": 1}, "workers=0: give a whole number, 1 or more"),
        ({"workers": 1, "ps": True}, "ps=True: give a whole number"),
        ({"workers": 1, "ps": 1, "replicas_per_worker": 0}, "replicas_per_worker=0: give a whole number"),
        ({"replicas_per_worker": 2}, "replicas_per_worker=2 is for a cluster with parameter servers"),
        ({"workers": 1, "ps": 1, "n": 2}, "n=2 with workers=1 and ps=1"),
        ({"workers": 1, "ps": 1, "on": SSH(["a"], 2)}, "per_host=2 for a cluster of worker 0, ps 0"),
        ({"workers": 1, "ps": 1, "on": Servers(SimpleClusterResolver(CLUSTER))}, "names them already"),
    ],
)
def test_invalid_numbers_are_refused(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=text):
        distnb.start(**given)


def test_a_resolver_defines_tasks() -> None:
    resolver = SimpleClusterResolver(CLUSTER, task_type="chief", task_id=0)
    assert server_cluster_tasks(resolver) == {W0: "a:1", W1: "a:2", PS0: "b:1"}
    assert server_cluster_tasks(SimpleClusterResolver({"worker": ["a:1"]})) == {}
    resolver.task_type = "ps"
    with pytest.raises(OptionError, match=r"This process is ps 0 of its cluster.* run `distnb worker`"):
        hosts_of(Servers(resolver))


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ({"worker": ["a:1"]}, "has no ps"),
        ({"ps": ["a:1"], "chief": ["b:1"]}, "has no worker"),
        ({"ps": ["a:1"], "worker": []}, "has no worker"),
        ({**CLUSTER, "chief": ["c:1", "d:1"]}, "has 2 chiefs"),
        ({**CLUSTER, "master": ["e:1"]}, "has the job 'master'"),
        ({**CLUSTER, "ps": {1: "b:1"}}, r"The ps tasks of the cluster are \[1\]"),
    ],
)
def test_clusters_without_a_coordinator_are_refused(cluster: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tasks_in(ClusterSpec(cluster))


def test_tasks_are_assigned_to_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check that each kind is distributed over the machines in turn, or placed by a resolver."""
    read = hosts_of(SSH("a,b"), workers=3, ps=2)
    assert read == HostOptions(hosts=("a", "b"), tasks={W0: "a", W1: "b", W2: "a", PS0: "a", PS1: "b"})
    assert list(read.tasks) == [W0, W1, W2, PS0, PS1]
    resolver = SimpleClusterResolver(CLUSTER)
    assert hosts_of(SSH(resolver)) == HostOptions(hosts=("a", "b"), tasks={W0: "a", W1: "a", PS0: "b"})
    secret = tmp_path / "secret"
    on, addresses = Servers(resolver, secret=secret), ("a:1", "a:2", "b:1")
    expected = dict(zip((W0, W1, PS0), addresses, strict=True))
    assert hosts_of(on) == HostOptions(hosts=addresses, tasks=expected)
    names = {"a:1": "worker 0", "a:2": "worker 1", "b:1": "ps 0"}
    assert on.way(hosts_of(on)) == Way(ServerTransport, (secret, names))
    with pytest.raises(OptionError, match="several tasks the address of worker 0, a:1"):
        hosts_of(Servers(SimpleClusterResolver({"worker": ["a:1"], "ps": ["a:1"]}), secret=secret))
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-3]", "TASKS_PER_NODE": "1(x3)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert hosts_of(Slurm(), workers=1, ps=2).tasks == {W0: "n1", PS0: "n1", PS1: "n2"}
    read = hosts_of(Slurm(SlurmClusterResolver({"worker": 2, "ps": 1})))
    assert read.tasks == {W0: "n1", W1: "n2", PS0: "n3"}


def planned(
    monkeypatch: pytest.MonkeyPatch, on: OtherMachines, gpus: int, devices: str | None = None, **given: Any
) -> HostPlan:
    found = Found(gpus, Capacity(cores=2, memory_nbytes=2**40), {})
    monkeypatch.setattr(MachineLinks, "open", lambda links, names, on_progress: dict.fromkeys(names, found))
    monkeypatch.setattr("distnb.machines.host_plan.listening_address", lambda names, interface: "10.0.0.1")
    options = StartOptions(on=on, devices=devices, **given)
    processes = Processes()
    try:
        return on.planner(options)(options, processes, lambda text: None)
    finally:
        processes.close()


def devices_of(plan: EnginePlan) -> list[str]:
    return [str(each.device) for each in plan.engines]


def test_workers_get_the_gpus_of_their_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("s" * 40)
    on = Servers(SimpleClusterResolver(CLUSTER), secret=secret)
    plan = planned(monkeypatch, on, gpus=2)
    assert devices_of(plan) == ["cuda:0", "cuda:1", "cpu:0"]  # a:1 and a:2 are one machine
    assert [(each.task, each.host) for each in plan.engines] == [(W0, "a:1"), (W1, "a:2"), (PS0, "b:1")]
    assert devices_of(planned(monkeypatch, on, gpus=0)) == ["cpu:0", "cpu:1", "cpu:0"]
    with pytest.raises(StartError, match="a: 2 engines were asked for but this machine has 1 GPU"):
        planned(monkeypatch, on, gpus=1)
    assert devices_of(planned(monkeypatch, on, gpus=1, devices="cpu:0,cpu:1")) == [
        "cpu:0",
        "cpu:1",
        "cpu:0",
    ]
    with pytest.raises(StartError, match="each at an address of its own, cannot gain workers"):
        plan.place_further(plan.engines, 1)
    crowded = planned(monkeypatch, MPI("a"), gpus=0, workers=2, ps=1)
    assert "3 engines share the 2 cores of a" in crowded.notices[0]


def test_servers_of_one_machine_divide_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("s" * 40)
    on = Servers(SimpleClusterResolver({"worker": ["a:1", "a:2", "b:1"]}), secret=secret)
    plan = planned(monkeypatch, on, gpus=2)
    placed = [(each.host, str(each.device)) for each in plan.engines]
    assert placed == [("a:1", "cuda:0"), ("a:2", "cuda:1"), ("b:1", "cuda:0"), ("b:1", "cuda:1")]
    with pytest.raises(StartError, match="a: 2 engines were asked for but this machine has 1 GPU"):
        planned(monkeypatch, on, gpus=1)


def test_workers_may_have_several_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use the requested number, or the accelerators that a resolver reports."""
    asked: dict[str, Any] = {"workers": 2, "ps": 1, "replicas_per_worker": 2}
    found = hosts_of(MPI("a,b"), **asked)
    assert found == HostOptions(hosts=("a", "b"), tasks={W0: "a", W1: "b", PS0: "a"}, replicas=2)
    plan = planned(monkeypatch, MPI("a,b"), gpus=2, **asked)
    assert [(each.task, each.host) for each in plan.engines] == [(W0, "a"), (W0, "a"), (W1, "b"), (W1, "b"), (PS0, "a")]
    assert devices_of(plan) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cpu:0"]
    counted = SimpleClusterResolver(CLUSTER, num_accelerators={"GPU": 4})
    for given, replicas in (None, 4), (1, 1):
        assert hosts_of(SSH(counted), replicas_per_worker=given).replicas == replicas
    assert hosts_of(SSH(SimpleClusterResolver(CLUSTER))).replicas == 1


def test_tasks_of_this_machine_are_found() -> None:
    plan = plan_on_this_machine(StartOptions(devices="cpu:4,cpu:7", oversubscribe=True, workers=2, ps=2))
    assert devices_of(plan) == ["cpu:4", "cpu:7", "cpu:0", "cpu:0"]
    assert [each.task for each in plan.engines] == [W0, W1, PS0, PS1]


def test_servers_on_loopback_share_a_secret_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DISTNB_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = secret_path(None, ("127.0.0.1:1", "localhost:2", "[::1]:3"))
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    keys = read_secret(made)
    assert read_secret(secret_path(None, ("127.0.0.1:9",))) == keys
    assert [*made.parent.iterdir()] == [made]
    with pytest.raises(StartError, match="none is named"):
        secret_path(None, ("127.0.0.1:1", "10.0.0.1:2"))
    with pytest.raises(StartError, match="none is named"):
        secret_path(None)
    assert secret_path("named", ("127.0.0.1:1",)) == Path("named")


@pytest.mark.parametrize("job", ["chief", "evaluator"])
def test_a_coordinator_runs_no_server(job: str) -> None:
    with pytest.raises(OptionError, match=f"{job} 0 of a cluster with parameter servers has no engine"):
        distnb.Server(CLUSTER, job, 0)


def test_servers_are_waited_for_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTNB_START_TIMEOUT", raising=False)
    assert connect_patience_s() == 60.0
    monkeypatch.setenv("DISTNB_START_TIMEOUT", "2.5")
    assert connect_patience_s() == 2.5
    for wrong in ("0", "-1", "soon", "inf", "nan"):
        monkeypatch.setenv("DISTNB_START_TIMEOUT", wrong)
        with pytest.raises(OptionError, match="Give the seconds"):
            connect_patience_s()


def test_parameter_servers_require_a_cluster() -> None:
    with pytest.raises(
        NoClusterError, match=r"no cluster is running\. Start one with %distnb start --workers 2 --ps 1"
    ):
        require()
    with pytest.raises(OptionError, match="has no ps"):
        require(SimpleClusterResolver({"worker": ["a:1"]}))
