"""Engines on other machines, without a machine: options, addresses, and reports of an end."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import platform
import queue
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import distnb
from distnb.cluster.connection import Connection, Keys, make_keys
from distnb.cluster.engine_plan import plan_on_this_machine, planner_of
from distnb.cluster.heartbeat_listener import HeartbeatListener
from distnb.cluster.local.capacity import Capacity
from distnb.cluster.local.launcher import EngineOrder, PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.cluster.network import address_towards, interface_of, listening_address
from distnb.cluster.process_environment import without_task_variables
from distnb.cluster.resolvers import SimpleClusterResolver, SlurmClusterResolver, TFConfigClusterResolver
from distnb.cluster.start_options import StartOptions
from distnb.cluster.worker_placement import are_workers
from distnb.errors import OptionError, StartError
from distnb.machines.agents.heartbeat import heartbeat
from distnb.machines.agents.machine_launcher import Hosts, MachineLinks
from distnb.machines.agents.machine_messages import Assignment, decode_report, encode_order, encode_report
from distnb.machines.host_plan import HostOptions, plan_hosts
from distnb.machines.other_machines import OtherMachines
from distnb.machines.start_line import read_options
from distnb.machines.transport import Found, Transport, Way
from distnb.machines.transports.mpiexec import MPI, MpiexecTransport
from distnb.machines.transports.ray_nodes import Ray, RayNodes
from distnb.machines.transports.server_transport import Servers, ServerTransport
from distnb.machines.transports.srun import Slurm, SrunTransport
from distnb.machines.transports.ssh import SSH, SSHTransport
from distnb.magics.commands import COMMANDS
from distnb.options import nbytes_of
from distnb.topology import Device, Team

WORKERS = SimpleClusterResolver({"worker": ["a:1", "a:2", "b:1"]}, num_accelerators={"GPU": 2})
CONNECTION = Connection(
    program_url="tcp://10.0.0.1:1",
    control_url="tcp://10.0.0.1:2",
    server_public="a",
    client_public="b",
    client_secret="c",
    notebook_pid=4,
)


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


def hosts_of(on: OtherMachines, **given: Any) -> HostOptions:
    return on.find_hosts(StartOptions(on=on, **given))


def read_line(text: str, **user_ns: Any) -> OtherMachines | None:
    return read_options(vars(COMMANDS["start"].read(text)), user_ns)


def test_named_machines() -> None:
    on = SSH("a, me@b", 2, interface="eth0", arguments=["-p", "22"])
    assert hosts_of(on) == HostOptions(hosts=("a", "me@b"), per_host=2, interface="eth0")
    assert on.way(hosts_of(on)) == Way(SSHTransport, (("-p", "22"),))
    assert hosts_of(SSH(["a"])) == HostOptions(hosts=("a",))
    mpi = MPI(["a"], arguments=["--mca", "x", "y"])
    assert mpi.way(hosts_of(mpi)) == Way(MpiexecTransport, (("--mca", "x", "y"),))


def test_a_zero_on_a_line_is_a_value() -> None:
    on = read_line("--ray --cpus-per-engine 0 --gpus-per-engine 0.5 --wait 0")
    assert isinstance(on, Ray)
    assert (on.cpus_per_engine, on.gpus_per_engine, on.wait) == (0, 0.5, 0)


def test_the_number_of_engines_on_each_machine() -> None:
    assert hosts_of(SSH(["a:4", "me@b:2"])).per_host == {"a": 4, "me@b": 2}
    assert hosts_of(SSH("a:4,b")) == HostOptions(hosts=("a", "b"), per_host={"a": 4})
    assert hosts_of(SSH(["fe80::1"])).hosts == ("fe80::1",)
    assert hosts_of(SSH(["a", "b", "c"]), n=5).per_host == {"a": 2, "b": 2, "c": 1}
    assert hosts_of(SSH(["a:4", "b:4"]), n=8).per_host == {"a": 4, "b": 4}
    assert hosts_of(SSH(["a", "b"], 4), n=8).per_host == {"a": 4, "b": 4}
    for on in (SSH(["a:4", "b:4"]), SSH(["a:4", "b"]), SSH(["a", "b"], 3)):
        with pytest.raises(OptionError, match="n=7, but the machines have other numbers of engines"):
            hosts_of(on, n=7)
    with pytest.raises(OptionError, match="n=1 for 2 machines, a, b"):
        hosts_of(SSH(["a", "b"]), n=1)


def test_a_resolver_names_machines(tmp_path: Path) -> None:
    tasks = {"a": 2, "b": 1}
    found = hosts_of(SSH(WORKERS))
    assert found == HostOptions(hosts=("a", "b"), per_host={"a": 4, "b": 2}, without_gpus=tasks)
    found = hosts_of(MPI(SimpleClusterResolver(WORKERS.cluster_spec()), 3))
    assert found == HostOptions(hosts=("a", "b"), per_host=3, without_gpus=tasks)
    secret = tmp_path / "secret"
    on, servers = Servers(WORKERS, secret=secret), ("a:1", "a:2", "b:1")
    assert hosts_of(on) == HostOptions(hosts=servers, per_host=dict.fromkeys(servers, 2))
    assert on.way(hosts_of(on)) == Way(ServerTransport, (secret, {}))


ALLOCATION = {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "TASKS_PER_NODE": "3(x2)"}


def test_an_allocation_names_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    nodes = HostOptions(hosts=("n1", "n2"))
    assert hosts_of(Slurm()) == nodes
    on = Slurm("n2", 1, arguments=["--exclusive"])
    assert hosts_of(on) == dataclasses.replace(nodes, hosts=("n2",), per_host=1)
    assert on.way(hosts_of(on)) == Way(SrunTransport, (("--exclusive",),))
    with pytest.raises(OptionError, match=r"'n3' is not a node of this Slurm allocation\. Its nodes are n1, n2"):
        Slurm("n3")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "3")  # set by the user, unlike salloc's own variables
    nodes = dataclasses.replace(nodes, without_gpus={"n1": 3, "n2": 3})
    assert hosts_of(Slurm()) == nodes
    # The notebook is no task of a step, and its GPUs are not cut.
    found = hosts_of(Slurm(SlurmClusterResolver(gpus_per_task=2)))
    assert found == dataclasses.replace(nodes, per_host={"n1": 6, "n2": 6})


def test_srun_does_not_inherit_the_variables_of_the_notebooks_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("JOB_ID", "NTASKS", "CPU_BIND", "PROCID", "CONF"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    names = {name for name in SrunTransport().environment() if name.startswith("SLURM_")}
    assert names == {"SLURM_JOB_ID", "SLURM_CONF"}
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("TF_CONFIG", "{}")
    left = without_task_variables(os.environ)
    assert "SLURM_JOB_ID" in left
    assert not {"SLURM_PROCID", "PMI_RANK", "TF_CONFIG"} & set(left)


def test_a_host_list_is_recognised_as_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = SimpleClusterResolver({"worker": ["a:1", "a:2", "b:1"]})
    assert are_workers(("a:1", "a:2", "b:1"), workers)
    assert are_workers(("me@a", "b"), workers)
    assert not are_workers(("a",), workers)
    assert not are_workers((), workers)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}')
    assert are_workers(("b:1",), TFConfigClusterResolver())


def test_engines_are_distributed_over_machines(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Capacity(cores=16, memory_nbytes=2**40)
    found = {"a": Found(4, room, {"numpy": "2.1"}), "b": Found(0, Capacity(cores=1, memory_nbytes=2**40), {})}
    monkeypatch.setattr(MachineLinks, "open", lambda links, hosts, on_progress: found)
    monkeypatch.setattr("distnb.machines.host_plan.listening_address", lambda names, interface: "10.0.0.1")

    notices: list[str] = []

    def engines(devices: str | None = None, **words: Any) -> dict[str, int]:
        machines = HostOptions(hosts=("a", "b"), **words)
        options = StartOptions(devices=devices)
        plan = plan_hosts(machines, Way(SSHTransport), (), options, processes, lambda text: None)
        notices[:] = plan.notices
        assert plan.packages == {"a": {"numpy": "2.1"}, "b": {}}
        return dict(Counter(each.host for each in plan.engines))

    assert engines() == {"a": 4, "b": 2}
    assert engines(without_gpus={"a": 1, "b": 1}) == {"a": 4, "b": 1}
    assert engines(per_host={"a": 2}) == {"a": 2, "b": 2}
    assert engines(devices="cpu:0", without_gpus={"a": 3, "b": 3}) == {"a": 1, "b": 1}
    assert notices == []
    assert engines(without_gpus={"b": 3}) == {"a": 4, "b": 3}
    assert len(notices) == 1
    assert "3 engines share the 1 core of b" in notices[0]
    with pytest.raises(StartError, match=r"^b: 9 engines were asked for on a machine with 1 core"):
        engines(without_gpus={"b": 9})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Slurm(), "runs in none .* `salloc --no-kill --nodes=2 jupyter lab`"),
        (lambda: Servers({"worker": ["a:1"]}), "is not a resolver. Give an object"),
        (lambda: hosts_of(SSH(SimpleClusterResolver({"ps": ["a:1"]}))), "has no worker"),
        (lambda: SSH(["a,b"]), "is not the name of a machine"),
        (lambda: SSH(["a"], 0), "per_host=0: give a whole number"),
        (lambda: SSH(["a"], "2"), "per_host='2': give a whole number"),
        (lambda: SSH(["a:0"]), "the number in 'a:0'=0: give a whole number"),
        (lambda: SSH(["a:2"], 2), "both give numbers of engines"),
        (lambda: hosts_of(SSH(["a"]), n=0), "n=0: give a whole number"),
        (lambda: SSH([]), "machines is empty"),
        (lambda: SSH(["-oProxyCommand=x"]), "is not the name of a machine"),
        (lambda: SSH(["a b"]), "is not the name of a machine"),
        (lambda: SSH(["a", "b", "a"]), "more than once"),
        (lambda: SSH(["a"], arguments="-v"), "give a list of words"),
        (lambda: hosts_of(Ray(), workers=2, ps=1, replicas_per_worker=2), "replicas_per_worker=2 does not apply"),
        (lambda: Ray(cpus_per_engine=-1), "cpus_per_engine=-1: give a number, 0 or more"),
        (lambda: Ray("local"), "'local' is not an address. Write host:port"),
        (lambda: StartOptions(on="ssh"), r"on='ssh': name other machines by an object, such as distnb.SSH"),
        (lambda: SSH(["a"]).planner(StartOptions(replicas_per_worker=2)), "is for a cluster with parameter servers"),
        (lambda: planner_of(StartOptions(replicas_per_worker=2)), "is for a cluster with parameter servers"),
    ],
)
def test_invalid_machines_are_refused(make: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make()


def test_a_line_describes_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_line("") is None
    assert read_line("--launcher local -n 2") is None
    assert read_line('--hosts a,b:2 --interface eth0 --ssh-args "-p 22"') == SSH(
        "a,b:2", interface="eth0", arguments=["-p", "22"]
    )
    assert read_line("--hosts a --launcher mpi --per-host 2") == MPI("a", 2)
    assert read_line("--resolver w --launcher ssh", w=WORKERS) == SSH(WORKERS)
    assert read_line("--resolver w --secret s", w=WORKERS) == Servers(WORKERS, secret="s")
    assert read_line("--ray -n 2") == Ray()
    assert read_line("--ray 10.0.0.5:6379 --spread --wait 60") == Ray("10.0.0.5:6379", spread=True, wait=60)
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert read_line("--launcher slurm") == Slurm()
    assert isinstance(read_line("--resolver slurm"), Slurm)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--per-host 2", "--per-host is for engines on other machines. Name them, too: --hosts a,b"),
        ("--ssh-args=-v", "--ssh-args is for engines on other machines"),
        ("--launcher ssh", "--launcher ssh is for engines on other machines. Name them, too: --hosts a,b"),
        ("--launcher server", "Name them, too: --resolver"),
        ("--launcher slurm", "runs in none"),
        ("--launcher pbs --hosts a", "use mpi or ssh with its machines: --hosts a,b"),
        ("--launcher rsh --hosts a", "The launchers are local, ssh, slurm, mpi, server"),
        ("--launcher slurm --ssh-args=-v", "--ssh-args does not apply to --launcher slurm, which takes --hosts and .*"),
        ("--hosts a --launcher-args=-v", "--launcher-args does not apply to --launcher ssh"),
        ("--hosts a --secret s", "--secret does not apply to --launcher ssh"),
        ("--hosts a --resolver w --launcher ssh", "both name machines"),
        ("--launcher local --hosts a", "--hosts is for engines on other machines"),
        ("--resolver x", "there is no x. Name one of slurm, tfconfig, kubernetes"),
        ("--ray --hosts a", "--hosts does not apply to --launcher ray"),
        ("--ray --launcher ssh", "--ray does not apply to --launcher ssh"),
        ("--gpus-per-engine 1", "Name them, too: --hosts a,b, --ray or --ipyparallel"),
        ("--ipyparallel --ray", "--ray does not apply to --launcher ipyparallel"),
    ],
)
def test_a_contradictory_line_is_refused(line: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        read_line(line, w=WORKERS)


def test_a_ray_cluster_has_a_bundle_for_each_engine() -> None:
    on = Ray("10.0.0.5:6379", gpus_per_engine=0.5, spread=True, wait=60)
    found = hosts_of(on, n=3)
    assert found.hosts == ("ray-0", "ray-1", "ray-2")
    assert on.way(found) == Way(RayNodes, (on,))
    assert {str(task): host for task, host in hosts_of(Ray(), workers=2, ps=1).tasks.items()} == {
        "worker 0": "ray-0",
        "worker 1": "ray-1",
        "ps 0": "ray-2",
    }


def test_the_ray_cluster_of_the_notebook_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="10.0.0.7:6379")
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False))
    connected = SimpleNamespace(
        is_initialized=lambda: True, get_runtime_context=lambda: context, util=SimpleNamespace(client=client)
    )
    monkeypatch.setitem(sys.modules, "ray", connected)
    assert Ray().way(hosts_of(Ray(), n=2)) == Way(RayNodes, (Ray("10.0.0.7:6379"),))


def test_a_notebook_listens_on_the_address_of_its_launcher() -> None:
    assert plan_on_this_machine(StartOptions(n=2)).address == ""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.7") == "lo"
    assert listening_address(["127.0.0.1"], None) == "127.0.0.1"
    assert listening_address(["nowhere.invalid"], "lo") == "127.0.0.1"
    assert listening_address(["nowhere.invalid"], "127.0.0.1") == "127.0.0.1"
    with pytest.raises(StartError, match=r"no route to 'nowhere.invalid'.*interface='eth0'"):
        listening_address(["nowhere.invalid"], None)
    with pytest.raises(StartError, match=r"no network interface and no address 'eth77'\. Give one of these: lo"):
        listening_address(["127.0.0.1"], "eth77")


def test_messages_are_lines_among_others() -> None:
    assignment = Assignment(connection=CONNECTION, notebook="10.0.0.1", agent="agent", hash_seed="0")
    line = encode_order("begin", dataclasses.asdict(assignment))
    assert line.count(b"\n") == 1
    assert Assignment.of(json.loads(line)[1]) == assignment
    line = encode_report("output", 3, "two\nlines ä")
    assert line.count(b"\n") == 1
    assert decode_report(b"[1,0]<stdout>:" + line) == ["output", 3, "two\nlines ä"]
    for other in (b"Welcome to red.\n", b"distnb [\n", b"distnb: waiting\n", b"\n"):
        assert decode_report(other) is None


def test_the_heartbeat_detects_the_end_of_the_notebook() -> None:
    keys, others = make_keys(), make_keys()
    listener = HeartbeatListener("127.0.0.1", keys)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def watch(client: Keys) -> AbstractContextManager[None]:
        return heartbeat(listener.url, dataclasses.replace(client, server_public=keys.server_public), lost.put)

    try:
        with pytest.raises(StartError, match="refused this machine's keys"), watch(others):
            pass
        with watch(keys):
            pass
        assert lost.empty()
        with watch(keys):
            listener.close()
            assert "was lost" in lost.get(timeout=60)
    finally:
        listener.close()


class _Shell(Transport):
    """A transport to machines whose names are programs that act as machine agents."""

    def command(self, host: str) -> list[str]:
        return ["sh", "-c", host]

    def network_name(self, host: str) -> str:
        return host

    def unreached(self, host: str, status: int) -> str:
        return f"Nothing is started by {host!r}."

    def cause(self, said: str) -> str:
        return "it is full" if "disk full" in said else ""


def report(*words: Any) -> str:
    return f"echo '{encode_report(*words).decode().strip()}'; "


_FACTS = {
    "distnb": distnb.__version__,
    "python": platform.python_version(),
    "gpus": 0,
    "capacity": {"cores": 2, "memory_nbytes": 2**30},
    "packages": {},
}
_ANSWERS = report("facts", _FACTS)
_BEATS = _ANSWERS + "read begin; read launch; " + report("beat")
_LOST = "was lost: its machine"


def launch(program: str, processes: Processes, log: Path) -> tuple[Hosts, dict[int, int], Any]:
    """Launch two engines on the machine that a program represents. Return the launcher, their pids, and their ends."""
    ends: queue.SimpleQueue[tuple[int, str, bool]] = queue.SimpleQueue()
    links = MachineLinks(_Shell(), processes)
    links.open([program])
    engines = [PlacedEngine(engine, Device("cpu"), program) for engine in range(2)]
    launcher = Hosts(engines, CONNECTION, "10.0.0.1", links)
    orders = [
        EngineOrder(engine=each, device=Device("cpu"), log=log / f"log-{each}", agent="agent") for each in range(2)
    ]
    pids: dict[int, int] = {}
    launcher.launch(
        orders, processes, pids.__setitem__, lambda engine, pid, words, expected: ends.put((engine, words, expected))
    )
    return launcher, pids, ends


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (report("ended", 0, "exited with code 7") + report("ended", 1, "exited with code 7"), "exited with code 7"),
        (
            report("closes", "was killed by SIGTERM") + report("ended", 0, "was killed by SIGKILL"),
            "was killed by SIGTERM",
        ),
        ("echo disk full >&2; " + report("closes", "exited with code 1"), "exited with code 1 (it is full)"),
        ("exit 137", "was killed by SIGKILL"),  # srun's message for an end by the administrator
        ("kill -9 $$", "was killed by SIGKILL"),
        ("echo disk full >&2; exit 255", "was ended (it is full)"),
        ("exit 255", _LOST),
        ("setsid sleep 600 & wait", _LOST),  # conftest looks for what is left
        ("trap '' TERM; setsid sleep 600 & wait", _LOST),
    ],
)
def test_the_end_of_an_engine_is_reported_with_its_cause(
    program: str, message: str, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distnb.machines.agents.machine_link.LOST_AFTER_S", 0.5)
    program = _BEATS + program
    _, _, ends = launch(program, processes, tmp_path)
    found = [ends.get(timeout=60), ends.get(timeout=60)]
    assert [engine for engine, _, _ in found] == [0, 1]
    for _, words, expected in found:
        assert not expected
        assert words.replace(program, "a") == (
            f"{message} a cannot be reached" if message == _LOST else f"(on a) {message}"
        )


def test_an_agent_gets_the_cluster_before_its_orders(processes: Processes, tmp_path: Path) -> None:
    program = (
        f'{_ANSWERS} read begin; read launch; echo "$begin" > {tmp_path}/begin; echo "$launch" > {tmp_path}/launch; '
        + report("output", 1, "a line\n").replace("\\n", "\\\\n")
        + report("ended", 1, "exited with code 0")
        + 'read end; [ "$end" = \'["end", [0]]\' ] && '
        + report("ended", 0, "exited with code 0")
        + "read close"
    )
    launcher, pids, ends = launch(program, processes, tmp_path)
    assert ends.get(timeout=60) == (1, f"(on {program}) exited with code 0", False)
    launcher.expect_end({0: pids[0]}, processes)
    launcher.end({0: pids[0]}, processes)
    assert ends.get(timeout=60) == (0, f"(on {program}) exited with code 0", True)
    name, given = json.loads((tmp_path / "begin").read_text())
    assert name == "begin"
    assert Assignment.of(given).connection == dataclasses.replace(CONNECTION, notebook_pid=0, controller=False)
    assert json.loads((tmp_path / "launch").read_text()) == ["launch", [[0, "cpu:0"], [1, "cpu:0"]], 2]
    assert (tmp_path / "log-1").read_text() == "a line\n"
    launcher._links.close()


def test_machines_that_cannot_be_used_are_one_error(processes: Processes) -> None:
    links = MachineLinks(_Shell(), processes)
    other = report("facts", _FACTS | {"distnb": "0.0.1"}) + "read close"
    with pytest.raises(StartError) as caught:
        links.open(["echo no such node >&2; exit 1", other, _ANSWERS + "read close"])
    text = str(caught.value)
    assert re.search(r"(?s)Nothing is started by 'echo .*Its output:.*no such node", text)
    assert "has distnb 0.0.1 on Python" in text
    assert text.count("Functions are sent between them") == 1


def test_each_mpiexec_has_its_own_session_folder(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mpiexec"
    program.write_text(f'#!/bin/sh\necho "$OMPI_MCA_orte_local_tmpdir_base" >> {tmp_path}/folders\nexit 1\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(StartError, match="mpiexec cannot start a process on b"):
        MachineLinks(MpiexecTransport(), processes).open(["a", "b"])
    folders = [*map(Path, (tmp_path / "folders").read_text().split())]
    assert len({*folders}) == 2
    assert {folder.parent for folder in folders} == {processes.directory}


def test_replicas_know_who_is_on_their_machine() -> None:
    gpus = (Device("cuda", 0), Device("cuda", 1)) * 2
    team = Team(
        engines=(0, 1, 2, 3), devices=gpus, generation=1, store_host="", store_port=0, hosts=("a", "a", "b", "b")
    )
    assert team.has_own_devices
    assert (team.on_host_of(1), team.on_host_of(2)) == ((0, 1), (2, 3))
    alone = Team(engines=(0, 1, 2, 3), devices=gpus, generation=1, store_host="", store_port=0)
    assert not alone.has_own_devices
    assert alone.on_host_of(3) == (0, 1, 2, 3)


def test_the_magic_and_the_function_accept_the_same_options() -> None:
    fields = {each.name for each in dataclasses.fields(StartOptions) if each.init}
    assert fields == set(inspect.signature(distnb.start).parameters) - {"on_progress"}
    line = vars(COMMANDS["start"].read(""))
    assert read_options(line, {}) is None
    assert line.keys() == fields - {"on"}
    plain, default = StartOptions(**line), StartOptions()
    for name in fields:
        assert getattr(plain, name) == getattr(default, name)


def test_options_of_a_start_are_checked_when_they_are_created() -> None:
    with pytest.raises(OptionError, match="workers=2 and ps=None"):
        StartOptions(workers=2)
    with pytest.raises(OptionError, match="n=3 with workers=1 and ps=1"):
        StartOptions(n=3, workers=1, ps=1)
    with pytest.raises(OptionError, match="much"):
        StartOptions(data_limit="much")
    assert StartOptions(data_limit="2 GB").data_limit_nbytes == nbytes_of("2 GB")
