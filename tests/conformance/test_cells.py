"""The programs in a notebook: as `%%distribute` cells and as ordinary cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.ways import TIME_LIMIT_S, Way, cases, cell_of, judge, named, outcome_of, prepare
from tests.kernel import Notebook

pytestmark = pytest.mark.timeout(TIME_LIMIT_S)


@pytest.fixture(scope="module")
def notebook_with(request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """Provide a notebook with such engines."""
    with Notebook() as notebook:
        notebook.run(f"%distnb start {request.param}", timeout_s=120)
        yield notebook


@pytest.mark.parametrize(
    ("notebook_with", "program", "way"), cases("cell", "ordinary"), indirect=["notebook_with"], scope="module"
)
def test_a_program_is_right_or_refused(notebook_with: Notebook, program: str, way: Way) -> None:
    found = named(program)
    prepare(notebook_with, found, way)
    judge(found, way, outcome_of(notebook_with, found, cell_of(found, way, found.text)))
