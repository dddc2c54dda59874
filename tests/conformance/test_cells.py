"""The programs in a notebook: as `%%distribute` cells and as ordinary cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.conformance.ways import TIME_LIMIT_S, Way, cases, cell_of, judge, named, outcome_of, prepare
from tests.support.kernel import Notebook
from tests.support.processes import OF_MODULE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(TIME_LIMIT_S)]


@pytest.fixture(scope="module")
def notebook_with() -> Iterator[Callable[[str], Notebook]]:
    """Return a function that provides a notebook with such engines. It ends the notebook that had other engines."""
    with ExitStack() as stack:
        current: dict[str, Notebook] = {}

        def start(engines: str) -> Notebook:
            if engines not in current:
                stack.pop_all().close()
                current.clear()
                current[engines] = stack.enter_context(Notebook())
                current[engines].run(f"%distnb start {engines}", timeout_s=120)
                current[engines].run("import gc\ngc.freeze()")  # each %reset collects, and visits what is not frozen
                OF_MODULE.update(current[engines].processes())
            return current[engines]

        yield start


@pytest.mark.parametrize(("engines", "program", "way"), cases("cell", "ordinary"))
def test_a_program_is_right_or_refused(
    notebook_with: Callable[[str], Notebook], engines: str, program: str, way: Way
) -> None:
    notebook, found = notebook_with(engines), named(program)
    notebook.run("%reset -f")  # a text with `eval` would send the names of earlier programs
    prepare(notebook, found, way)
    judge(found, way, outcome_of(notebook, found, cell_of(found, way, found.text)))
