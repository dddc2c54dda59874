"""Exercises have one solution each, students' copies have none, and a check fails until its exercise is done."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EXERCISES = sorted((ROOT / "notebooks" / "exercises").glob("*.ipynb"))


@pytest.fixture(scope="module")
def handout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the students' copies, made as the page for teachers says."""
    page = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ (jupyter nbconvert (?:.*\\\n)*.*)$", page, flags=re.MULTILINE)
    folder = tmp_path_factory.mktemp("handout")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = command.replace("--output-dir handout", f"--output-dir {folder}")
    subprocess.run(command, shell=True, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PATH": path})
    return folder


def _cells(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return cells


def _tagged(cell: dict[str, Any], tag: str) -> bool:
    return tag in cell["metadata"].get("tags", ())


def _functions(cell: dict[str, Any]) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.parse("".join(cell["source"])).body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("notebook", EXERCISES, ids=lambda path: path.stem)
def test_each_exercise_states_its_task_and_has_a_folded_solution(notebook: Path) -> None:
    code = [cell for cell in _cells(notebook) if cell["cell_type"] == "code"]
    places = [place for place, cell in enumerate(code) if _tagged(cell, "exercise")]
    assert places
    for number, place in enumerate(places, start=1):
        exercise, solution = code[place : place + 2]
        assert _tagged(solution, "solution")
        assert solution["metadata"]["jupyter"]["source_hidden"]
        assert _functions(solution).keys() == _functions(exercise).keys()
        for function in _functions(exercise).values():
            assert re.match(rf"raise NotImplementedError\(.Exercise {number}: ", ast.unparse(function.body[-1]))


@pytest.mark.parametrize("notebook", EXERCISES, ids=lambda path: path.stem)
def test_each_check_has_a_message(notebook: Path) -> None:
    cells = ("".join(cell["source"]) for cell in _cells(notebook) if cell["cell_type"] == "code")
    code = [re.sub(r"^[!%].*", "", cell, flags=re.MULTILINE) for cell in cells]
    checks = [node for cell in code for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Assert)]
    assert checks
    assert [ast.unparse(check) for check in checks if check.msg is None] == []


@pytest.mark.parametrize("notebook", EXERCISES, ids=lambda path: path.stem)
def test_students_copies_have_no_solutions(notebook: Path, handout: Path) -> None:
    copy = _cells(handout / notebook.name)
    assert [cell["source"] for cell in copy] == [
        cell["source"] for cell in _cells(notebook) if not _tagged(cell, "solution")
    ]
    assert not any(cell.get("outputs") for cell in copy)


_WORKER_FN = """
def worker_fn(iterator):
    x, y = next(iterator)
    (-F.cross_entropy(model(x), y)).backward()
    optimizer.step()
    mean_loss.update(1.0)
"""
_DATASET_FN = """
def dataset_fn(context):
    x, y = (rows[context.input_pipeline_id :: context.num_input_pipelines] for rows in train)
    yield from zip(x.split(50), y.split(50), strict=True)
"""
_TRAIN_STEP = """
def train_step(model, optimizer, batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    {}
"""
_CALLBACKS = """
def make_callbacks():
    stopping = keras.callbacks.EarlyStopping(monitor="loss", mode="min", patience=2, restore_best_weights=True)
    return [distnb.keras.EpochDots(report_every=10), stopping]
"""
_COMPILED_LATER = """
def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential(make_layers())
    model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=["accuracy"])
    return model
"""
_ATTEMPTS = {
    "workers": [(1, _DATASET_FN, "repeat the loop with `while True`"), (2, _WORKER_FN, "")],
    "sharded": [(3, "def activations(model, rows):\n    model(rows)\n    return 0\n", "No saved tensor")],
    "loss_scaling": [(2, "def average_loss(losses):\n    return losses.sum() / 7\n", "should be -28")],
    "image_set": [
        (1, _TRAIN_STEP.format("loss.backward()\n    optimizer.step()\n    return loss.detach()"), "zero_grad"),
        (1, _TRAIN_STEP.format("optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()"), "`return loss`"),
        (1, _TRAIN_STEP.format("optimizer.zero_grad()\n    loss.backward()\n    return loss.detach()"), "step()"),
    ],
    "fit_text": [(1, _COMPILED_LATER, None), (2, _CALLBACKS, "monitor 'val_loss'")],
}
"""Answers by notebook: the number of the exercise, the answer, and words of the error, or None if it is right."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name == "fit_text" else []) for name in _ATTEMPTS]
)
def test_a_check_says_what_is_wrong_and_accepts_a_corrected_answer(name: str) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "notebooks" / "exercises" / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    exercises = [place for place, cell in enumerate(code) if _tagged(cell, "exercise")]
    cells: list[Any] = []
    attempts: list[tuple[str | None, list[Any]]] = []
    done = 0
    for exercise in sorted({number for number, *_ in _ATTEMPTS[name]}):
        place = exercises[exercise - 1]
        check = next(each for each, cell in enumerate(code) if each > place and "\nassert " in cell["source"])
        cells += code[done:place]
        for number, answer, words in _ATTEMPTS[name]:
            if number == exercise:
                tried = [nbformat.v4.new_code_cell(answer), *map(nbformat.from_dict, code[place + 2 : check + 1])]
                for cell in tried:
                    cell["metadata"] = {"tags": ["raises-exception"]}
                cells += tried
                attempts.append((words, [len(cells) - count for count in range(len(tried), 0, -1)]))
        cells += code[place + 1 : check + 1]
        done = check + 1
    notebook["cells"] = [
        nbformat.from_dict({**cell, "id": f"cell-{number}"}) for number, cell in enumerate([*cells, code[-1]])
    ]
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}})
    client.execute(env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)})
    for words, places in attempts:
        outputs = [output for place in places for output in notebook.cells[place].get("outputs", ())]
        errors = [output for output in outputs if output["output_type"] == "error"]
        if words is None:
            assert not errors
        else:
            assert errors[0]["ename"] == "AssertionError"
            assert words in "\n".join(errors[0]["traceback"])


@pytest.mark.timeout(120)
def test_a_check_names_the_unsolved_exercise(handout: Path) -> None:
    import nbformat  # loads in seconds, in each process that collects the tests
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(handout / "default_strategy.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(ROOT)}})
    with pytest.raises(CellExecutionError, match="Exercise 1: "):
        client.execute(env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)})
