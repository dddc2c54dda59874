"""Cached processes: Accelerate and Transformers do not use the processes that they found earlier in a later cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.bound_classes import names_missing
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SETUP = """
import distnb, torch
from accelerate import Accelerator, PartialState
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

both, second = distnb.MirroredStrategy(), distnb.MirroredStrategy(["cpu:1"])
args = TrainingArguments({folder!r}, use_cpu=True, report_to="none")
here = [args.world_size, args.process_index, args.n_gpu]
"""
MADE_HERE = """
from transformers import Trainer

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
state, trainer = PartialState(), Trainer(model, args)
"""
# What Transformers' Trainer does to find the processes, in its order.
FIND = """%%distribute {}
args.accelerator_config.to_dict()
made = Accelerator()
found = [made.num_processes, args.world_size, args.process_index]
args.device, made.distributed_type
"""


@pytest.fixture
def caching(notebook: Notebook, tmp_path: Path) -> Notebook:
    notebook.run(SETUP.format(folder=str(tmp_path)))
    assert notebook.value("here") == [1, 0, 0]
    return notebook


def found(notebook: Notebook) -> list[list[int]]:
    value: list[list[int]] = notebook.value("[list(each) for each in both.local_results(found)]")
    return value


def test_training_arguments_made_in_the_notebook_find_the_replicas(caching: Notebook) -> None:
    caching.run(FIND.format("both"))
    assert found(caching) == [[2, 2, 0], [2, 2, 1]]
    assert caching.value("[args.world_size, args.process_index, args.n_gpu]") == [1, 0, 0]
    caching.run("args.num_train_epochs = 7")
    caching.run(FIND.format("both") + "found[0] = args.num_train_epochs")
    assert found(caching) == [[7, 2, 0], [7, 2, 1]]
    caching.run("%%distribute second\nargs.num_train_epochs = 8\nalone = [args.world_size, args.process_index]")
    assert caching.value("list(alone)") == [1, 0]
    assert caching.value("[args.num_train_epochs, args.world_size]") == [8, 1]


def test_objects_made_for_the_notebooks_one_process_are_refused(caching: Notebook) -> None:
    caching.run(MADE_HERE)
    for name, kind in (
        ("accelerator", "accelerate.accelerator.Accelerator"),
        ("optimizer", "accelerate.optimizer.AcceleratedOptimizer"),
        ("state", "accelerate.state.PartialState"),
        ("trainer", "transformers.trainer.Trainer"),
    ):
        used = caching.try_run(f"%%distribute both\n{name}.step")
        assert used.error_name == "CannotTravelError"
        assert f"`{name}` cannot be sent: it is " in used.error_text
        assert f"{kind} (it stores the processes" in used.error_text
        assert "make it inside the distributed cell" in used.error_text
    for internals in ("accelerate_internals", "transformers_internals"):
        assert caching.value(names_missing(internals)) == []


def test_a_model_prepared_in_the_notebook_is_prepared_for_the_replicas(caching: Notebook) -> None:
    caching.run("model = torch.nn.Linear(1, 1)\nprepared = Accelerator(cpu=True).prepare(model) is model")
    assert caching.value("prepared") is True
    caching.run(
        "%%distribute both\nprepared = isinstance(Accelerator(cpu=True).prepare(model), DistributedDataParallel)"
    )
    assert caching.value("prepared") is True


def test_accelerate_has_as_many_processes_as_a_program_has_replicas(caching: Notebook) -> None:
    fresh = "from accelerate.state import AcceleratorState\nAcceleratorState._reset_state(True)"
    caching.run(f"%%distribute both\n{fresh}\nhas_unsent = Accelerator()\nprocesses = has_unsent.num_processes")
    assert caching.value("processes") == 1, "it did not count the CPU"
    used = caching.try_run("%%distribute both\nhas_unsent.num_processes")
    assert used.error_name == "AttributeError"
    assert "not reinitialized" in used.error_text
    caching.run("%%distribute both\nkept = Accelerator(cpu=True)\nprocesses = kept.num_processes")
    assert caching.value("processes") == 2
    caching.run("%%distribute second\nprocesses = Accelerator(cpu=True).num_processes")
    assert caching.value("processes") == 1
    caching.run("%%distribute both\nfound = [kept.num_processes, kept.process_index]")
    assert found(caching) == [[2, 0], [2, 1]], "it works again with as many replicas as it was made with"
