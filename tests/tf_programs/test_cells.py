"""The same programs in a notebook: as `%%distribute` cells, as ordinary cells, and as functions."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Notebook
from tests.tf_programs.matrix import PROGRAMS, REFERENCE
from tests.tf_programs.test_programs import same

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


def text_of(program: str) -> str:
    return (PROGRAMS / f"{program}.py").read_text(encoding="utf-8")


ON_ENGINES = {
    "mirrored": "MirroredStrategy",
    "central_storage": "CentralStorageStrategy",
    "multi_worker": "MultiWorkerMirroredStrategy",
}


WORDS = ("default", "one_device", "mirrored", "central_storage", "multi_worker")
# Cells differ from scripts by what travels, and that hardly by the strategy.
WHOLE = ("keras_whole_scope", "whole_scope")


def cases() -> list[Any]:
    """Return programs under words. The way names the fixture's run for the comparison."""
    programs = [path.stem for path in sorted(PROGRAMS.glob("*.py"))]
    return [
        pytest.param(program, REFERENCE, word, marks=[] if word == "mirrored" else pytest.mark.soak)
        for program in programs
        for word in WORDS
    ]


@pytest.mark.parametrize(("program", "way", "word"), cases())
def test_a_program_runs_in_a_distributed_cell(
    notebook: Notebook, launch: Callable[[str], list[dict[str, Any]]], tmp_path: Path, program: str, way: str, word: str
) -> None:
    begin(notebook, tmp_path)
    notebook.run(f"%%distribute {word}\n{text_of(program)}", timeout_s=150)
    same(fetched(notebook), launch(way)[0][program]["result"])


# The others enter a scope in a function, or ask who they are: there the notebook is no replica.
@pytest.mark.parametrize(
    "word", ["mirrored", *(pytest.param(each, marks=pytest.mark.soak) for each in ("central_storage", "multi_worker"))]
)
@pytest.mark.parametrize(
    ("program", "way"), [(each, REFERENCE) for each in ("average_loss", "digits", *WHOLE, "values")]
)
def test_a_program_runs_in_an_ordinary_cell(
    notebook: Notebook, launch: Callable[[str], list[dict[str, Any]]], tmp_path: Path, program: str, way: str, word: str
) -> None:
    begin(notebook, tmp_path)
    notebook.run(f"import distnb\nstrategy = distnb.{ON_ENGINES[word]}()\n{text_of(program)}", timeout_s=150)
    same(fetched(notebook), launch(way)[0][program]["result"])


@pytest.mark.parametrize(
    ("program", "way", "made"), [("keras_whole_scope", REFERENCE, "later"), ("whole_scope", REFERENCE, "model")]
)
def test_a_program_runs_in_a_repeated_function(
    notebook: Notebook, launch: Callable[[str], list[dict[str, Any]]], tmp_path: Path, program: str, way: str, made: str
) -> None:
    begin(notebook, tmp_path)
    body = textwrap.indent(text_of(program), "    ")
    notebook.run(f"import distnb\ndef program(strategy):\n{body}\n    return result, {made}", timeout_s=150)
    for _ in range(2):
        notebook.run("result, made = program(distnb.MirroredStrategy())", timeout_s=150)
        assert notebook.run("print(type(made).__name__)").stdout == "RemoteMirrored\n"
        same(fetched(notebook), launch(way)[0][program]["result"])


def begin(notebook: Notebook, folder: Path) -> None:
    notebook.run(f"import os, torch\nos.chdir({str(folder)!r})\ntorch.manual_seed(0)")


def fetched(notebook: Notebook) -> Any:
    """Return the cell's results: the first replica's, which are equal on all."""
    value = "distnb.MirroredStrategy().local_results(result)[0]"
    return json.loads(notebook.run(f"import json, distnb\nprint(json.dumps({value}))").stdout)
