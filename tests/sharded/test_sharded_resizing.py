"""Sharded objects outlive a resize. After a death they wait for a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import distnb
from distnb.errors import EngineDied
from tests.core.notebook.resize_cases import MAKE, TRAIN
from tests.sharded.test_sharded_values import PROGRAM, printed
from tests.support.kernel import Notebook
from tests.support.processes import OF_MODULE
from tests.support.sessions import run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(2) as notebook:
        notebook.run("import torch\nimport distnb")
        yield notebook


@pytest.fixture(autouse=True)
def _module_owns_the_engines(notebook: Notebook) -> Iterator[None]:
    yield
    OF_MODULE.update(notebook.processes())


def resize(notebook: Notebook, size: int) -> None:
    """Give the notebook a number of engines."""
    notebook.run(f"%distnb stop\n%distnb start -n {size}")


_KEPT = """
with strategy.scope():
    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    other[0].weight = model[0].weight
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(5, 3))
    narrow = torch.nn.Sequential(torch.nn.Linear(5, 2), torch.nn.Linear(2, 2).double())
    with torch.device("meta"):
        made_later = torch.nn.Linear(5, 6)
model[0].weight.label = "first"
first, parameters = model[0], list(model.parameters())
averages = [each.detach().clone() for each in parameters]
holder = {"model": model, "average": averages[0]}
loss = (model(inputs) - targets).square().sum()
loss.backward()
"""
_LOOK = """
print([[round(x, 4) for x in torch.as_tensor(each.tolist()).flatten().tolist()] for each in (
    *model.parameters(), *other.parameters(), *normed.parameters(), *narrow.parameters(), *made_later.parameters(),
    *averages, holder["average"], model[0].weight.grad, optimizer.state_dict()["state"][2]["exp_avg"])])
"""
_SAME = """
weight = model[0].weight
assert weight is other[0].weight is parameters[0] is first.weight is optimizer.param_groups[0]["params"][0]
assert first is model[0] and model is holder["model"] and holder["average"] is averages[0]
assert weight.label == "first"
assert type(narrow[1].weight).__name__ == "DTensor" and len({each.to_local().shape for each in averages}) > 1
assert isinstance(strategy.run(lambda: (model(inputs), other(inputs), normed(inputs), made_later(inputs))), tuple)
"""


def test_every_shard_outlives_another_number_of_replicas(notebook: Notebook) -> None:
    resize(notebook, 2)
    notebook.run(f"%%distribute sharded\n{PROGRAM}{_KEPT}")
    before = printed(notebook, _LOOK)
    for size in (3, 1, 2):
        notebook.run(f"%distnb resize {size}")
        assert printed(notebook, _LOOK) == before
        notebook.run(f"%%distribute sharded\n{_SAME}")
    assert "lost" not in notebook.run(f"%%distribute sharded\n{PROGRAM}").stderr


def test_a_resize_that_fails_leaves_the_shards() -> None:
    with started() as session:
        session.user_ns["strategy"] = distnb.ShardedStrategy()
        run_cell(session, MAKE, "make")

        def kill(text: str) -> None:
            if text.startswith("copying"):
                os.kill(session.status()[-1].pid, signal.SIGKILL)

        with pytest.raises(EngineDied, match=r"ended while|was killed"):
            session.resize(3, on_progress=kill)
        run_cell(session, TRAIN, "train")
        trained = session.user_ns["found"][1]
        session.resize(1)
        run_cell(session, "again = [p.tolist() for p in model.parameters()]", "read")
        assert session.user_ns["again"] == trained


def test_a_resize_after_a_death_asks_for_a_checkpoint(notebook: Notebook, tmp_path: Path) -> None:
    resize(notebook, 3)
    notebook.run(f"%%distribute sharded\n{PROGRAM}\npath = distnb.Checkpoint(model=model).save({str(tmp_path)!r})")
    saved = printed(notebook, "print(model[0].weight.tolist())")
    with pytest.raises(AssertionError, match="EngineDied"):
        notebook.run(
            "%%distribute sharded\nimport os, signal\nif distnb.replica_id() == 0:\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\nstrategy.run(lambda: model(torch.ones(2, 5)))"
        )
    with pytest.raises(AssertionError, match=r"lost the shards of engine 0.* restart --missing"):
        notebook.run("model[0].weight.tolist()")
    notebook.run("%distnb resize 2")
    with pytest.raises(AssertionError, match=r"The values of this tensor .*are lost"):
        notebook.run("model[0].weight.tolist()")
    notebook.run("distnb.Checkpoint(model=model).restore(path)")
    assert printed(notebook, "print(model[0].weight.tolist())") == saved


def test_sizes_that_shards_do_not_fit_are_refused(notebook: Notebook) -> None:
    resize(notebook, 2)
    notebook.run("grouped = distnb.ShardedStrategy(replicas_per_group=2)")
    notebook.run("%%distribute grouped\nwith strategy.scope():\n    model = torch.nn.Linear(5, 4)")
    with pytest.raises(AssertionError, match=r"3 replicas cannot be divided into groups of 2.*`model` would be lost"):
        notebook.run("%distnb resize 3")
    notebook.run(
        "%%distribute grouped\ndef step():\n    with strategy.no_sync():\n"
        "        model(torch.ones(2, 5)).sum().backward()\nstrategy.run(step)"
    )
    notebook.run("del grouped")
    with pytest.raises(AssertionError, match="UnsyncedGradientError: Linear has gradients"):
        notebook.run("%distnb resize 4")
    notebook.run("model.zero_grad()")
    notebook.run("%distnb resize 4")
    assert printed(notebook, "print(len(model.weight.tolist()))") == "4"
