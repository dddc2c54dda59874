"""One notebook, engines on other machines: they start by ssh, train with the right numbers, and are lost and found."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F

import distnb
from distnb.errors import CollectiveError, EngineDied
from distnb.session.session import Session
from tests import processes
from tests.machines import Machines, machines

pytestmark = pytest.mark.timeout(170)

HOSTS = ("red", "blue")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines"), *HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(network: Machines) -> Iterator[Session]:
    session = distnb.start(hosts=HOSTS, per_host=2, ssh_args=network.ssh_args)
    processes.OF_MODULE.update(processes.children_of_this_run())
    try:
        yield session
    finally:
        distnb.stop()


def _where() -> Any:
    import os
    import socket

    import psutil

    import distnb

    listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
    local = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    path = os.environ["DISTNB_CONNECTION"]
    return distnb.replica_id(), socket.gethostname(), local, sorted(listening), path


def test_engines_are_where_they_were_asked_for(network: Machines, cluster: Session) -> None:
    strategy = distnb.MirroredStrategy()
    found = [strategy.local_results(strategy.run(_where))[replica] for replica in range(4)]
    assert [(replica, host, local) for replica, host, local, _, _ in found] == [
        (0, "red", ("0", "2")),
        (1, "red", ("1", "2")),
        (2, "blue", ("0", "2")),
        (3, "blue", ("1", "2")),
    ]
    assert [row.host for row in cluster.status()] == ["red", "red", "blue", "blue"]
    for _, host, _, listening, path in found:
        assert listening == [network.address(host)]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
    assert {host for host, _ in processes.listening_ports()} == {network.own}


def test_no_secret_is_an_argument_or_a_variable(cluster: Session) -> None:
    secrets = re.compile(cluster._keys.client_secret.encode().replace(b"(", rb"\(") and re.escape(
        cluster._keys.client_secret.encode()
    ))
    looked_at = 0
    for pid in processes.children_of_this_run():
        for name in ("cmdline", "environ"):
            try:
                assert not secrets.search(Path(f"/proc/{pid}/{name}").read_bytes())
            except OSError:
                continue
            looked_at += 1
    assert looked_at >= 2 * 3 * 4  # ssh, keeper and engine of each of four


def _train(strategy: Any, steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    from sklearn.datasets import load_digits

    torch.manual_seed(7)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data / 16, dtype=torch.float64)[:250], torch.tensor(digits.target)[:250]
    data = torch.utils.data.TensorDataset(inputs, labels)
    with strategy.scope():
        layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        model = torch.nn.Sequential(*layers).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(batch: Any) -> Any:
        x, y = batch
        loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for batch in strategy.distribute_dataset(data, batch_size=64):  # the last one has 58
        losses.append(float(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)))
    return losses, {name: torch.as_tensor(value.numpy()) for name, value in model.state_dict().items()}


def test_training_equals_one_replica(cluster: Session) -> None:
    losses, state = _train(distnb.MirroredStrategy())
    alone, expected = _train(distnb.get_strategy())
    assert losses == pytest.approx(alone, rel=1e-9)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_a_machine_that_is_cut_off(network: Machines, cluster: Session) -> None:
    kept = torch.zeros(1)
    lost = [row.pid for row in cluster.status() if row.host == "blue"]

    def step() -> Any:
        nonlocal kept
        import torch.distributed as dist

        while True:
            dist.all_reduce(kept)
            if cut is not None and dist.get_rank() == 0:
                cut.touch()

    cut = Path(os.environ["TMPDIR"]) / "distnb-goes"
    import threading

    def cut_off() -> None:
        processes.wait_until(cut.exists, 60)
        network.cut("blue")

    cutter = threading.Thread(target=cut_off)
    cutter.start()
    try:
        with pytest.raises((EngineDied, CollectiveError), match="machine blue cannot be reached|connection to another"):
            distnb.MirroredStrategy().run(step)
    finally:
        cutter.join()
        cut.unlink(missing_ok=True)
    # The notebook knows of the loss a moment later than the replicas may.
    processes.wait_until(lambda: sum("cannot be reached" in row.state for row in cluster.status()) == 2, 20)
    left = distnb.MirroredStrategy()
    assert left.local_results(left.run(lambda: distnb.replica_id())) == (0, 1)
    assert left.num_replicas_in_sync == 2
    for pid in lost:  # they watch their connection themselves: nobody can tell them
        processes.ends(pid, 20)
    network.join("blue")


def test_its_engines_come_back(cluster: Session) -> None:
    assert cluster.restart(missing=True) == (2, 3)
    processes.OF_MODULE.update(processes.children_of_this_run())
    strategy = distnb.MirroredStrategy()
    assert strategy.local_results(strategy.run(lambda: distnb.replica_id())) == (0, 1, 2, 3)


def test_stop_leaves_no_process_anywhere(cluster: Session) -> None:
    engines = [row.pid for row in cluster.status()]
    distnb.stop()
    assert not any(psutil.pid_exists(pid) for pid in engines)
    assert not any("distnb" in " ".join(each.cmdline()) for each in processes.children_of_this_run().values())
    assert not processes.run_directories()
