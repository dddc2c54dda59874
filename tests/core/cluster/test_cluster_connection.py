from __future__ import annotations

import dataclasses
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from distnb.cluster.connection import Connection, make_keys
from distnb.cluster.process_environment import (
    Seat,
    compute_environment,
    engines_environment,
    script_environment,
    threads_for,
)
from distnb.cluster.rendezvous_store import RendezvousStore
from distnb.cluster.worker_placement import network_environment
from distnb.errors import StartError
from distnb.topology import Device


def make_connection() -> Connection:
    keys = make_keys()
    return Connection(
        program_url="tcp://a:1",
        control_url="tcp://a:2",
        server_public=keys.server_public,
        client_public=keys.client_public,
        client_secret=keys.client_secret,
        notebook_pid=42,
    )


def test_a_connection_file_is_read_back_and_is_secret(tmp_path: Path) -> None:
    connection = make_connection()
    path = connection.write(tmp_path)
    assert Connection.read(path) == dataclasses.replace(connection, directory=str(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_connection_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = make_connection().write(tmp_path)
    path.chmod(0o640)
    with pytest.raises(StartError, match=r"can be read or changed by other users \(mode 640"):
        Connection.read(path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"program_url": 1'])
def test_an_invalid_connection_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "connection.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(StartError, match="is not the connection file"):
        Connection.read(path)
    with pytest.raises(StartError, match="cannot be read"):
        Connection.read(tmp_path / "missing.json")


def test_keys_are_new_each_time() -> None:
    one, other = make_keys(), make_keys()
    assert len({one.server_secret, one.client_secret, other.server_secret, other.client_secret}) == 4


def test_the_store_listens_on_loopback_before_torch_is_loaded() -> None:
    store = RendezvousStore()
    try:
        with socket.create_connection((store.host, store.port), timeout=60):
            pass
        assert store.host == "127.0.0.1"
        with pytest.raises(StartError, match=f"could not listen on 127.0.0.1:{store.port}"):
            RendezvousStore(store.port)
    finally:
        store.close()
    with pytest.raises(StartError, match="was closed"):
        store.serve()


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_impossible_port_is_a_clear_error(port: int) -> None:
    with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
        RendezvousStore(port)


def test_threads_share_the_cores_unless_the_user_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distnb.cluster.process_environment.cores", lambda: 8)
    assert [threads_for(n, {}) for n in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    assert threads_for(2, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_for(2, {"OMP_NUM_THREADS": "6,2"}) == 6
    assert threads_for(2, {"OMP_NUM_THREADS": "none"}) == 4


def test_every_computing_process_communicates_on_loopback() -> None:
    environment = compute_environment(2)
    assert {environment[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")} == {"lo"}


def test_secrets_are_not_in_an_engines_environment(tmp_path: Path) -> None:
    connection = make_connection()
    connection.write(tmp_path)
    text = repr(engines_environment(2, tmp_path, agent="agent"))
    assert connection.client_secret not in text
    assert str(tmp_path / "connection.json") in text


def test_named_gpus_are_assigned_to_the_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = (Device("cuda", 2), Device("cuda", 5))
    environment = script_environment(1, devices[1], devices, Seat(store_host="127.0.0.1", store_port=7))
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["DISTNB_DEVICE"]) == ("2,5", "cuda:1")
    assert [environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")] == ["1", "2", "1", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,4,3,1,0")
    assert (
        script_environment(0, devices[0], devices, Seat(store_host="", store_port=7))["CUDA_VISIBLE_DEVICES"] == "4,0"
    )
    assert (
        script_environment(0, Device("cpu"), (Device("cpu"),), Seat(store_host="", store_port=7))[
            "CUDA_VISIBLE_DEVICES"
        ]
        == ""
    )


def test_replicas_are_numbered_by_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = (Device("cpu", 0), Device("cpu", 1))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    seat = Seat(store_host="10.0.0.1", store_port=2222, worker=2, workers=3, network=network_environment("eth1"))
    environment = script_environment(1, devices[1], devices, seat)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[name] for name in names] == ["5", "6", "1", "2", "2", "10.0.0.1", "2222"]
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")


def test_devices_and_stores_need_no_torch() -> None:
    code = (
        "import sys\nfrom distnb.cluster import connection, devices, lifecycle, rendezvous_store\n"
        "devices.plan_devices()\nrendezvous_store.RendezvousStore().close()\nconnection.make_keys()\n"
        "assert 'torch' not in sys.modules, 'torch'\nassert 'ipyparallel' not in sys.modules, 'ipyparallel'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_torchs_socket_warnings_are_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert compute_environment(2)["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert compute_environment(2)["TORCH_CPP_LOG_LEVEL"] == "INFO"
