"""A strategy unknown to distnb, defined in one file (tests/support/dividing_strategy.py) and used by cells and scripts."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel import Notebook
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

PROGRAM = """
import torch
inputs = torch.arange(30, dtype=torch.float32).reshape(10, 3) / 30
with strategy.scope():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

def step(batch):
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().sum() / 5
    loss.backward()
    optimizer.step()
    return loss.detach(), torch.tensor(len(batch))

losses, rows = [], []
for begin in (0, 5, 0):
    loss, count = strategy.reduce("sum", strategy.run(step, args=(inputs[begin : begin + 5],)), axis=None)
    losses.append(float(loss))
    rows.append(int(count))
result = [losses, rows, model.weight.detach().flatten().tolist()]
"""


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], list[int], list[float]]:
    """Return the program's result on one device."""
    import distnb

    names = {"strategy": distnb.OneDeviceStrategy("cpu:0")}
    exec(PROGRAM, names)
    losses, rows, weights = names["result"]
    return losses, rows, weights


def same(found: list[list[float]], expected: tuple[list[float], list[int], list[float]]) -> None:
    assert found[1] == expected[1]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]))
    torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(expected[2]))


@pytest.mark.parametrize("word", ["own", "tests.support.dividing_strategy:DividingStrategy"])
def test_a_cell_names_a_custom_strategy_by_its_object_or_class(
    notebook: Notebook, alone: tuple[list[float], list[int], list[float]], word: str
) -> None:
    notebook.run("from tests.support.dividing_strategy import DividingStrategy\nown = DividingStrategy()")
    ran = notebook.run(f"%%distribute {word}\n{PROGRAM}print(repr(strategy), strategy.num_replicas_in_sync)")
    assert "DividingStrategy() 2" in ran.stdout
    same(notebook.value("result"), alone)


def test_an_ordinary_cell_runs_its_scope_and_steps_on_replicas(
    notebook: Notebook, alone: tuple[list[float], list[int], list[float]]
) -> None:
    notebook.run(
        f"from tests.support.dividing_strategy import DividingStrategy\nstrategy = DividingStrategy()\n{PROGRAM}"
    )
    same([*notebook.value("result[:2]"), notebook.value("model.weight.numpy().ravel().tolist()")], alone)


def test_options_of_a_custom_strategy_and_of_the_magic_are_applied(notebook: Notebook) -> None:
    notebook.run(
        "from tests.support.dividing_strategy import DividingStrategy\nown = DividingStrategy(columns=True)\nimport torch"
    )
    ran = notebook.run("%%distribute own\nshape = strategy.run(lambda x: tuple(x.shape), args=(torch.ones(3, 4),))")
    assert not ran.stderr
    assert notebook.value("shape") == (3, 2)
    one = notebook.run(
        "%%distribute tests.support.dividing_strategy:DividingStrategy -n 1\nprint(strategy.num_replicas_in_sync)"
    )
    assert "1" in one.stdout


def test_a_class_outside_a_module_is_refused(notebook: Notebook) -> None:
    notebook.run("from tests.support.dividing_strategy import DividingStrategy")
    ran = notebook.try_run("class Mine(DividingStrategy):\n    pass\nMine()")
    assert ran.error_name == "OptionError"
    assert "Define it in a module" in ran.error_text
    ran = notebook.try_run("%%distribute tests.support.dividing_strategy:Other\npass")
    assert "tests.support.dividing_strategy:Other cannot be imported" in ran.error_text


def test_a_script_uses_a_custom_strategy(alone: tuple[list[float], list[int], list[float]]) -> None:
    program = f"from tests.support.dividing_strategy import DividingStrategy\nstrategy = DividingStrategy()\n{PROGRAM}"
    for rank in run_ranks(program, 2):
        same(rank.check().result, alone)
