"""Engines on other machines, as far as no machine is needed: options, addresses, and how an end is told."""

from __future__ import annotations

import dataclasses
import queue
import signal
from typing import Any

import pytest

from distnb.cluster.connection import Connection, Keys, make_keys
from distnb.cluster.hosts import HostOptions, make_plan, read_host_options
from distnb.cluster.keeper import Assignment
from distnb.cluster.lifeline import Lifeline
from distnb.cluster.network import address_towards, interface_of, listening_address
from distnb.cluster.remote import Hosts
from distnb.cluster.ssh import SSH
from distnb.errors import OptionError, StartError
from distnb.topology import Device, Team
from distnb.wire.channel import Switchboard

CONNECTION = Connection("tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "a", "b", "c", "10.0.0.1", 3, 4, "harbour", "token")


def test_options_are_read() -> None:
    assert read_host_options() is None
    assert read_host_options(launcher="local", n=2) is None
    read = read_host_options("a, me@b", per_host=2, interface="eth0", ssh_args=["-p", "22"])
    assert read == HostOptions(("a", "me@b"), 2, "eth0", ("-p", "22"))
    assert read_host_options(["a"], launcher="ssh") == HostOptions(("a",))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"per_host": 2}, "per_host=2 is for engines on other machines"),
        ({"interface": "eth0"}, "interface='eth0' is for"),
        ({"launcher": "ssh"}, "launcher='ssh' is for"),
        ({"ssh_args": ["-v"]}, "is for engines on other machines"),
        ({"launcher": "slurm"}, "not there yet"),
        ({"launcher": "mpi", "hosts": ["a"]}, "not there yet"),
        ({"launcher": "rsh", "hosts": ["a"]}, "the launchers are 'local', 'ssh', 'server'"),
        ({"launcher": "local", "hosts": ["a"]}, "Leave one out"),
        ({"hosts": ["a"], "n": 2}, "per_host says"),
        ({"hosts": []}, "hosts is empty"),
        ({"hosts": ["-oProxyCommand=x"]}, "is no name of a machine"),
        ({"hosts": ["a b"]}, "is no name of a machine"),
        ({"hosts": ["a", "b", "a"]}, "more than once"),
        ({"hosts": ["a"], "ssh_args": "-v"}, "give a list of words"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        read_host_options(**given)


def test_where_a_notebook_listens() -> None:
    assert make_plan(2, None, None, lambda text: None, oversubscribe=False).address == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.7") == "lo"
    assert listening_address(["127.0.0.1"], None) == "127.0.0.1"
    assert listening_address(["nowhere.invalid"], "lo") == "127.0.0.1"
    assert listening_address(["nowhere.invalid"], "127.0.0.1") == "127.0.0.1"
    with pytest.raises(StartError, match=r"no way to 'nowhere.invalid'.*interface='eth0'"):
        listening_address(["nowhere.invalid"], None)
    with pytest.raises(StartError, match="no network interface, and no address, 'eth77' here; there are lo"):
        listening_address(["127.0.0.1"], "eth77")


def test_an_assignment_travels_as_one_line() -> None:
    told = Assignment(CONNECTION, "10.0.0.1", 2, "cpu:0", 4, "agent", True, {"PYTHONHASHSEED": "0"})
    assert told.encode().count(b"\n") == 1
    assert Assignment.decode(told.encode()) == told
    with pytest.raises(StartError, match="no assignment"):
        Assignment.decode(b"")


def test_the_lifeline_tells_when_the_notebook_goes() -> None:
    keys, others = make_keys(), make_keys()
    board = Switchboard(
        server_secret=keys.server_secret.encode(),
        server_public=keys.server_public.encode(),
        client_public=keys.client_public.encode(),
    )
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def connection(client: Keys) -> Connection:
        return dataclasses.replace(
            CONNECTION,
            control_url=board.control_url,
            server_public=keys.server_public,
            client_public=client.client_public,
            client_secret=client.client_secret,
        )

    try:
        with pytest.raises(StartError, match="did not let this machine in"), Lifeline(connection(others), lost.put):
            pass
        with Lifeline(connection(keys), lost.put):
            pass
        assert lost.empty()
        with Lifeline(connection(keys), lost.put):
            board.close()
            assert "was lost" in lost.get(timeout=20)
    finally:
        board.close()


def test_how_an_end_is_told() -> None:
    ground = Hosts(("a", "a", "b"), CONNECTION, "10.0.0.1", SSH())
    assert ground.describe(1, 255, "") == "was lost: its machine a cannot be reached any more"
    assert ground.lost_with(1, 255) == (0,)
    assert ground.describe(2, 128 + signal.SIGKILL, "exited with code 137") == "(on b) was killed by SIGKILL"
    assert ground.describe(2, 1, "exited with code 1") == "(on b) exited with code 1"
    assert ground.lost_with(2, 1) == ()


def test_replicas_know_who_is_on_their_machine() -> None:
    gpus = (Device("cuda", 0), Device("cuda", 1)) * 2
    team = Team((0, 1, 2, 3), gpus, 1, "", 0, ("a", "a", "b", "b"))
    assert team.apart
    assert (team.beside(1), team.beside(2)) == ((0, 1), (2, 3))
    alone = Team((0, 1, 2, 3), gpus, 1, "", 0)
    assert not alone.apart
    assert alone.beside(3) == (0, 1, 2, 3)
