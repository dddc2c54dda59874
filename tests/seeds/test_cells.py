"""The same programs in a notebook, as `%%distribute` cells."""

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


# The way names what the fixture runs for the comparison.
@pytest.mark.parametrize(("program", "way"), [("values", REFERENCE), ("custom_loop", REFERENCE)])
def test_a_distributed_cell(
    notebook: Notebook, launch: Callable[[str], list[dict[str, Any]]], program: str, way: str
) -> None:
    notebook.run("import torch\ntorch.manual_seed(0)")
    notebook.run(f"%%distribute mirrored\n{text_of(program)}", timeout_s=90)
    same(fetched(notebook), launch(way)[0][program]["result"])


def fetched(notebook: Notebook) -> Any:
    """What the cell left: the first replica's, which all have in common."""
    value = "distnb.MirroredStrategy().local_results(result)[0]"
    return json.loads(notebook.run(f"import json, distnb\nprint(json.dumps({value}))").stdout)
