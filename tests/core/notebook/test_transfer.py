"""Large arrays between notebook and engines: equal, owned by each side, through shared memory if available."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from distnb.cluster.start_options import StartOptions
from distnb.errors import EngineDied
from distnb.notebook import engines as session_engines
from distnb.notebook.session import Session
from distnb.options import StrategySpec
from distnb.wire.channel import Switchboard
from tests.support.worlds import ClusterWorld, Process, distributed, run_all

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

NBYTES = 8 << 20
MIRRORED = StrategySpec(kind="mirrored")


def descriptors() -> int:
    """Return the open descriptors of shipped frames. Other threads open and close their own."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            found += "distnb-buffer" in os.readlink(f"/proc/self/fd/{each}")
    return found


LOOK = f"""
import contextlib, gc, os
{inspect.getsource(descriptors)}
gc.collect()
mapped = open("/proc/self/maps").read().count("distnb-buffer")
held = descriptors()
"""


@contextlib.contextmanager
def running(replicas: int, *, apart: bool = False) -> Iterator[ClusterWorld]:
    """Start a cluster. If the notebook listens on a port, its engines behave as on another machine."""
    torch.set_num_threads(1)
    notebook = Process()

    def switchboard(directory: Path, **given: Any) -> Switchboard:
        return Switchboard(directory, **{**given, "host": "127.0.0.1" if apart else None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_engines, "Switchboard", switchboard)
        session = Session.start(
            StartOptions(n=replicas, devices=",".join(f"cpu:{i}" for i in range(replicas))), user_ns=notebook.user_ns
        )
    try:
        yield ClusterWorld(session, notebook)
    finally:
        session.stop()


@pytest.fixture(scope="module", params=["shared", "apart"])
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[ClusterWorld, bool]]:
    """Return two engines, and whether they share memory with the notebook."""
    shared = request.param == "shared"
    with running(2, apart=not shared) as world:
        yield world, shared


@pytest.fixture
def world(cluster: tuple[ClusterWorld, bool]) -> ClusterWorld:
    world, _ = cluster
    for name in list(world.names()):
        del world.notebook.user_ns[name]
    gc.collect()
    return world


@pytest.fixture
def mapped(cluster: tuple[ClusterWorld, bool]) -> int:
    """Return how many shipped frames are mapped after one large array arrived from the other side."""
    return int(cluster[1])


def held_here() -> int:
    gc.collect()
    return descriptors()


def buffers_here() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("distnb-buffer")


def look(world: ClusterWorld) -> tuple[list[int], list[int]]:
    """Return each replica's mappings of shipped frames, and its open descriptors."""
    run_all(world, [distributed(LOOK)])
    return [values(world.names()[name]) for name in ("mapped", "held")]  # type: ignore[return-value]


def values(found: Any) -> list[int]:
    return [found] * 2 if isinstance(found, int) else list(found.values)


@pytest.mark.parametrize("kind", ["plain", "read-only", "of rows", "in a frame", "of torch"])
def test_engines_of_a_machine_share_received_memory(kind: str, world: ClusterWorld, mapped: int) -> None:
    made = np.random.default_rng(1).random(NBYTES // 8)
    made.flags.writeable = kind != "read-only"
    kinds: dict[str, Any] = {"of rows": made.reshape(-1, 8)[:, ::-1], "of torch": torch.tensor(made)}
    kinds["in a frame"] = pandas.DataFrame({"x": made}, copy=False)
    world.notebook.user_ns["big"] = kinds.get(kind, made)
    run_all(world, [distributed("import numpy as np\ntotal = float(np.asarray(big).sum())" + LOOK)])
    assert values(world.names()["mapped"]) == [mapped, mapped]
    assert world.names()["total"] == pytest.approx(float(made.sum()))


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_values_travel_to_engines_and_back(
    kind: str, world: ClusterWorld, mapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.namespace, "most_nbytes", 0)  # arrays stay on the engines, like tensors
    ns = world.notebook.user_ns
    sent = np.random.default_rng(1).random(NBYTES // 8)
    ns["big"] = sent.copy() if kind == "array" else torch.from_numpy(sent.copy())
    run_all(world, [distributed("twice = big * 2" + LOOK)])
    assert values(ns["mapped"]) == [mapped, mapped]
    back = np.asarray(ns["twice"].values[1])
    assert np.array_equal(back, sent * 2)
    # A tensor made by torch can be resized on arrival, in memory that torch allocated there.
    assert buffers_here() == (mapped if kind == "array" else 0)
    back[:] = 0  # the notebook's own
    run_all(world, [distributed("total = float((twice - big * 2).sum())")])
    assert ns["total"] == 0.0
    run_all(world, [distributed("big += 1")])
    assert np.array_equal(np.asarray(ns["big"]), sent + 1)


def test_a_change_in_place_affects_no_other_process(world: ClusterWorld, mapped: int) -> None:
    ns = world.notebook.user_ns
    ns["big"] = np.zeros(NBYTES // 8)
    cell = """
import torch.distributed as dist
from distnb import replica_id
before = big.copy()
big[:] = replica_id() + 1
dist.barrier()
lowest, highest = big.min(), big.max()
big[:] = before
del before
"""
    run_all(world, [distributed(cell + LOOK)])
    assert values(ns["mapped"]) == [mapped, mapped]
    assert [ns["lowest"].values, ns["highest"].values] == [(1.0, 2.0), (1.0, 2.0)]
    assert ns["big"].max() == 0.0


def test_no_mapping_remains_open(world: ClusterWorld, mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.namespace, "most_nbytes", 0)  # the array stays
    ns = world.notebook.user_ns
    ns["big"] = np.zeros(NBYTES // 8)
    run_all(world, [distributed("copied = big + 1")])
    ns["copied"].values
    here, (kept, there) = held_here(), look(world)
    assert kept == [mapped, mapped]
    for _ in range(3):
        ns["big"] += 1
        ns["small"] = np.zeros(100_000)  # in one message with others
        ns["other"] = [np.zeros(250_000), np.zeros(500_000)]
        run_all(world, [distributed("copied = big + small[0] + other[1][0]")])
        assert ns["copied"].values[0][0] == ns["big"][0]
    assert held_here() == here
    assert buffers_here() == 0
    assert look(world)[1] == there
    del ns["big"], ns["small"], ns["other"], ns["copied"]
    gc.collect()
    run_all(world, [distributed("pass")])
    assert look(world) == [[0, 0], there]


def test_arguments_of_calls_are_released(world: ClusterWorld) -> None:
    session: Session = world._session
    given = []

    def mapped(x: Any = None) -> int:
        gc.collect()
        return open("/proc/self/maps").read().count("distnb-buffer")

    for _ in range(3):
        array = np.ones(NBYTES // 8)
        given.append(weakref.ref(array))
        session.calls.call(MIRRORED, "run", (mapped, (array,)), {})
    del array
    gc.collect()
    assert session.calls.call(MIRRORED, "run", (mapped, ()), {}) == 0  # those of the latest call were kept until now
    assert all(one() is None for one in given)


def test_pending_calls_keep_their_original_arguments(world: ClusterWorld) -> None:
    session: Session = world._session
    tensor = torch.empty(1 << 20)

    def ends(x: torch.Tensor) -> tuple[float, float]:
        return float(x.min()), float(x.max())

    pending = []
    for value in range(10):
        tensor.fill_(value)
        pending.append(session.calls.call(MIRRORED, "run", (ends, (tensor,)), {}, wait=False))
    assert [one.result() for one in pending] == [(float(value), float(value)) for value in range(10)]


def test_a_killed_engine_leaves_no_memory_behind() -> None:
    with running(2) as world:
        session, ns = world._session, world.notebook.user_ns
        ns["big"] = np.zeros(NBYTES // 8)
        run_all(world, [distributed("big.sum()")])
        here = held_here()
        tensor = torch.zeros(NBYTES // 4)
        pid = session.status()[1].pid

        def end_the_second(x: torch.Tensor, number: int) -> None:
            if number == 3 and os.getpid() == pid:
                os.kill(pid, signal.SIGKILL)

        def pipeline() -> None:
            for number in range(8):
                session.calls.call(MIRRORED, "run", (end_the_second, (tensor, number), {}), {}, wait=False)
            session.calls.finish()

        with pytest.raises(EngineDied):
            pipeline()
        session.restart(missing=True)
        ns["big"] += 3
        run_all(world, [distributed("lowest = float(big.min())" + LOOK)])
        assert ns["lowest"] == 3.0
        assert all(values(ns["mapped"]))
        assert held_here() == here
        assert buffers_here() == 0
