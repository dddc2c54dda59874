"""n replicas give one replica's numbers in every runtime, uneven last batch included.

The reference is plain PyTorch in this process, without distnb. The loss of every step is compared, and after three
epochs every weight, by the largest difference in a tensor relative to its largest entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.kernel import Notebook
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(150)

EXAMPLES = 505  # 505 = 7 * 64 + 57: the last batch is smaller, and cut unevenly for 2, 3 and 4 replicas
BATCH = 64
EPOCHS = 3
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@dataclass(frozen=True)
class Case:
    optimizer: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.dtype}"


CASES = [Case(optimizer, dtype) for dtype in ("float32", "float64") for optimizer in ("SGD", "Adam")]

# -- the program, in the three ways to write it --------------------------------------------------------------------

DATA = f"""
seeded = torch.Generator().manual_seed(5)
inputs = torch.rand({EXAMPLES}, 64, generator=seeded, dtype=torch.float64)
labels = (inputs @ torch.randn(64, 10, generator=seeded, dtype=torch.float64)).argmax(1)
"""
COMMON = f"""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import distnb

torch.set_num_threads(1)
{DATA}

def make_loader(dtype):
    return DataLoader(TensorDataset(inputs.to(getattr(torch, dtype)), labels), batch_size={BATCH}, shuffle=True)


def make_model(dtype):
    layers = [torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)]
    return torch.nn.Sequential(*layers).to(getattr(torch, dtype))


def make_optimizer(name, model):
    return {{"SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
            "Adam": lambda: torch.optim.Adam(model.parameters(), lr=3e-3)}}[name]()
"""

STEP = """
def train_step(batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""

CELL = f"""
torch.manual_seed(11)
with strategy.scope():
    model = make_model(DTYPE)
    optimizer = make_optimizer(OPTIMIZER, model)
{STEP}
steps = []
batches = strategy.distribute_dataset(make_loader(DTYPE))
for epoch in range({EPOCHS}):
    for batch in batches:
        steps.append(strategy.reduce("sum", strategy.run(train_step, args=(batch,)), axis=None).item())
weights = [parameter.tolist() for parameter in model.parameters()]
"""

# In ordinary cells the engines run the scope, and each step is one call from the notebook.
ORDINARY = [
    """
torch.manual_seed(11)
strategy = distnb.MirroredStrategy(devices=DEVICES)
with strategy.scope():
    model = make_model(DTYPE)
    optimizer = make_optimizer(OPTIMIZER, model)
""",
    f"""{STEP}
steps = []
batches = strategy.distribute_dataset(make_loader(DTYPE))
for epoch in range({EPOCHS}):
    for batch in batches:
        steps.append(float(strategy.reduce("sum", strategy.run(train_step, args=(batch,)), axis=None)))
weights = [parameter.tolist() for parameter in strategy.local_results(model)[0].parameters()]
""",
]


def reference(case: Case) -> tuple[list[float], list[torch.Tensor]]:
    """Train with plain PyTorch on the whole batch."""
    dtype = getattr(torch, case.dtype)
    data: dict[str, Any] = {"torch": torch}
    exec(DATA, data)
    loader = DataLoader(TensorDataset(data["inputs"].to(dtype), data["labels"]), batch_size=BATCH, shuffle=True)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).to(dtype)
        if case.optimizer == "SGD":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        steps = []
        for _ in range(EPOCHS):
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps.append(loss.item())
    return steps, [parameter.detach() for parameter in model.parameters()]


def compare(case: Case, steps: list[float], weights: list[object]) -> None:
    expected_steps, expected_weights = reference(case)
    tolerance = TOLERANCE[case.dtype]
    assert len(steps) == len(expected_steps) == EPOCHS * 8
    assert (
        difference(torch.tensor(steps, dtype=torch.float64), torch.tensor(expected_steps, dtype=torch.float64))
        < tolerance
    )
    for got, expected in zip(weights, expected_weights, strict=True):
        assert difference(torch.tensor(got, dtype=expected.dtype), expected) < tolerance


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


def constants(case: Case) -> str:
    return f"DTYPE = {case.dtype!r}\nOPTIMIZER = {case.optimizer!r}\n"


# -- the three runtimes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(4) as notebook:
        notebook.run(COMMON)
        for n in (1, 2, 3, 4):
            notebook.run(f"central_{n} = distnb.CentralStorageStrategy({[f'cpu:{i}' for i in range(n)]})")
            notebook.run(f"on_{n} = distnb.MirroredStrategy(devices={[f'cpu:{i}' for i in range(n)]})")
        yield notebook


def fetched(notebook: Notebook, strategy: str = "") -> tuple[list[float], list[object]]:
    """Return a cell's `steps` and `weights`: plain lists, or handles of that strategy."""
    values = f"[{strategy}.local_results(value)[0] for value in (steps, weights)]" if strategy else "[steps, weights]"
    steps, weights = json.loads(notebook.run(f"import json\nprint(json.dumps({values}))").stdout)
    return steps, weights


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("replicas", [3, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 4))])
def test_a_distributed_cell_trains_like_one_process(notebook: Notebook, replicas: int, case: Case) -> None:
    notebook.run(constants(case))
    notebook.run(f"%%distribute on_{replicas}\n{CELL}")
    compare(case, *fetched(notebook, f"on_{replicas}"))


@pytest.mark.parametrize(("replicas", "case"), [(1, CASES[3]), (2, CASES[0]), (4, CASES[3])], ids=str)
def test_a_cell_under_central_storage_trains_like_one_process(notebook: Notebook, replicas: int, case: Case) -> None:
    notebook.run(constants(case))
    notebook.run(f"%%distribute central_{replicas}\n{CELL}")
    compare(case, *fetched(notebook, f"central_{replicas}"))


@pytest.mark.parametrize("word", ["default", "one_device"])
def test_a_default_cell_trains_like_one_process(notebook: Notebook, word: str) -> None:
    case = Case("Adam", "float64")
    notebook.run(constants(case))
    notebook.run(f"%%distribute {word}\n{CELL}")
    compare(case, *fetched(notebook))


@pytest.mark.parametrize(("replicas", "case"), [(2, CASES[0]), (3, CASES[3]), (4, CASES[1])], ids=str)
def test_ordinary_cells_train_like_one_process(notebook: Notebook, replicas: int, case: Case) -> None:
    notebook.run(constants(case) + f"DEVICES = {[f'cpu:{i}' for i in range(replicas)]}")
    for cell in ORDINARY:
        notebook.run(cell)
    compare(case, *fetched(notebook))


def test_ordinary_cells_under_central_storage_train_like_one_process(notebook: Notebook) -> None:
    notebook.run(constants(CASES[3]))
    made, trained = ORDINARY
    notebook.run(made.replace("distnb.MirroredStrategy(devices=DEVICES)", "central_2"))
    notebook.run(trained)
    compare(CASES[3], *fetched(notebook))


# One after another in the same processes, since starting them takes most of the time.
SCRIPTS = {
    1: [("MirroredStrategy", CASES[0])],
    2: [("MirroredStrategy", CASES[3]), ("CentralStorageStrategy", CASES[2])],
    3: [("MirroredStrategy", CASES[2])],
    4: [("MirroredStrategy", CASES[1]), ("CentralStorageStrategy", CASES[1])],
}


@pytest.mark.timeout(175)
@pytest.mark.parametrize("replicas", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3, 4))])
def test_a_script_under_torchrun_trains_like_one_process(replicas: int) -> None:
    program = COMMON + "result = []\n"
    for strategy, case in SCRIPTS[replicas]:
        program += constants(case) + f"strategy = distnb.{strategy}()\n" + CELL + "\nresult.append((steps, weights))\n"
    for rank in run_ranks(program, replicas, timeout_s=160):
        for (_, case), found in zip(SCRIPTS[replicas], rank.check().result, strict=True):
            compare(case, *found)
