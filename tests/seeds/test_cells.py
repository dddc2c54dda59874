"""The same programs in a notebook: as a `%%distribute` cell, and as an ordinary cell whose calls go to the replicas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernel import Notebook
from tests.seeds.matrix import PROGRAMS, REFERENCE
from tests.seeds.test_programs import same

pytestmark = pytest.mark.timeout(170)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(2) as notebook:
        yield notebook


def text_of(program: str) -> str:
    return (PROGRAMS / f"{program}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(("program", "way"), [("values", REFERENCE), ("custom_loop", REFERENCE)])
def test_a_distributed_cell(
    notebook: Notebook, launch: Callable[[str], list[dict[str, Any]]], program: str, way: str
) -> None:
    notebook.run("import torch\ntorch.manual_seed(0)")
    notebook.run(f"%%distribute mirrored\n{text_of(program)}", timeout_s=90)
    same(fetched(notebook), launch(way)[0][program]["result"])


def test_an_ordinary_cell(notebook: Notebook) -> None:
    notebook.run("import distnb\nstrategy = distnb.MirroredStrategy()")
    notebook.run(text_of("values"), timeout_s=90)
    assert notebook.value("(n, here)") == (2, (0, 1))


def fetched(notebook: Notebook) -> Any:
    return json.loads(notebook.run("import json\nprint(json.dumps(result))").stdout)
