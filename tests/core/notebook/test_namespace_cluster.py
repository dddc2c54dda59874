"""The sequences of cells on a real cluster, and cases that need real processes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distnb.cluster.start_options import StartOptions
from distnb.errors import StaleHandleError
from distnb.notebook.handles.handle import RemotePerReplica
from distnb.notebook.session import Session
from distnb.options import StrategySpec
from tests.support.sequences import SEQUENCES
from tests.support.worlds import (
    ClusterWorld,
    PlainWorld,
    Process,
    compare,
    distributed,
    modes_kept,
    ordinary,
    run_all,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def notebook() -> Process:
    return Process()


@pytest.fixture(scope="module")
def session(notebook: Process) -> Iterator[Session]:
    torch.set_num_threads(1)
    session = Session.start(StartOptions(n=2, devices="cpu:0,cpu:1"), user_ns=notebook.user_ns)
    yield session
    session.stop()


@pytest.fixture
def world(session: Session, notebook: Process) -> Iterator[ClusterWorld]:
    with modes_kept():
        yield ClusterWorld(session, notebook)


# What engines in this process share with the notebook. tests/core/objects runs every sequence with such engines.
_NEED_PROCESSES = frozenset(
    {
        *("imports", "import here, use there", "IPython syntax", "random numbers", "default dtype", "globals()"),
        *("gradients on and off", "big arrays", "a large text", "cached functions", "threads of both", "exceptions"),
        *("enums, dataclasses, namedtuples", "class defined there", "functions and their globals", "estimators"),
        *("memory: numpy() of a tensor", "memory: from_numpy, sent apart", "modules of torch", "data of a notebook"),
    }
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _NEED_PROCESSES else pytest.mark.soak) for name in SEQUENCES]
)
def test_cells_behave_as_in_one_ipython(name: str, world: ClusterWorld) -> None:
    plain = PlainWorld()
    with modes_kept():
        run_all(plain, SEQUENCES[name])
    run_all(world, SEQUENCES[name])
    compare(plain.names(), world.names())


def test_objects_are_freed_on_engines(world: ClusterWorld) -> None:
    count = (
        "import gc, torch\ngc.collect()\nn = sum(torch.is_tensor(o) and o.numel() == 12345 for o in gc.get_objects())"
    )
    run_all(world, [distributed("import torch\nx = torch.zeros(12345)\ny = [x]"), distributed(count)])
    assert world.names()["n"] >= 1
    run_all(world, [ordinary("del x, y")])
    gc.collect()
    run_all(world, [distributed("pass"), distributed(count)])
    assert world.names()["n"] == 0


def test_engines_share_the_working_directory_and_local_modules(world: ClusterWorld, tmp_path: Path) -> None:
    (tmp_path / "distnb_test_local.py").write_text("value = 1\ndef f():\n    return value\n")
    ns = world.notebook.user_ns
    sys.path.insert(0, "")
    try:
        run_all(
            world,
            [
                ordinary(f"%cd -q {tmp_path}\nimport distnb_test_local as local"),
                distributed("a = local.f()\nimport os\nwhere = os.getcwd()"),
            ],
        )
        assert (ns["a"], ns["where"]) == (1, str(tmp_path))
        (tmp_path / "distnb_test_local.py").write_text("value = 200\ndef f():\n    return value\n")
        run_all(world, [ordinary("import importlib\nlocal = importlib.reload(local)"), distributed("b = local.f()")])
        assert ns["b"] == 200
        (tmp_path / "sub").mkdir()
        run_all(world, [distributed("os.chdir('sub')")])
        assert os.getcwd() == str(tmp_path / "sub")
    finally:
        sys.path.remove("")
        sys.modules.pop("distnb_test_local", None)


def test_a_replaced_engine_gets_the_namespace(notebook: Process) -> None:
    session = Session.start(StartOptions(n=2, devices="cpu:0,cpu:1"), user_ns=notebook.user_ns)
    try:
        _replace(ClusterWorld(session, notebook), session)
    finally:
        session.stop()


def _replace(world: ClusterWorld, session: Session) -> None:
    made = """
import torch, torch.distributed as dist, distnb
m = torch.nn.Linear(2, 2)
for p in m.parameters():
    torch.nn.init.ones_(p)
mine = [distnb.replica_id()]
"""
    run_all(world, [ordinary("history = []"), distributed(made)])
    ns = world.notebook.user_ns
    assert isinstance(ns["mine"], RemotePerReplica)
    session.restart([1])
    # Replicas meet in `all_reduce`, so the replacement is a full member of the group.
    met = """
t = torch.ones(1)
dist.all_reduce(t)
met = t.item()
s = sum(p.sum().item() for p in m.parameters())
history.append(s)
"""
    run_all(world, [distributed(met)])
    assert (ns["met"], ns["s"], ns["history"]) == (2.0, 6.0, [6.0])
    with pytest.raises(StaleHandleError, match="`mine`"):
        ns["mine"].values
    session.restart()
    with pytest.raises(StaleHandleError, match="`m`"):
        session.cells.run("m", StrategySpec(kind="mirrored"), filename="<cell>")
