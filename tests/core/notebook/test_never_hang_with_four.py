"""A case of each kind of wait, with four engines: some wait for others that wait themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.notebook import test_never_hang as with_two
from tests.core.notebook.test_never_hang import notebook, notebooks  # noqa: F401
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def engines() -> int:
    return 4


@pytest.mark.parametrize("where", ["raw all_reduce", "DistributedDataParallel's backward"])
def test_one_replica_raises_while_the_others_wait(notebook: Notebook, tmp_path: Path, where: str) -> None:  # noqa: F811
    with_two.test_one_replica_raises_while_the_others_wait(notebook, tmp_path, where, workers=True)


def test_collectives_that_do_not_match_are_an_error(notebook: Notebook) -> None:  # noqa: F811
    with_two.test_collectives_that_do_not_match_are_an_error(notebook, "one calls more")


def test_an_interrupt_ends_the_cell(notebook: Notebook, tmp_path: Path) -> None:  # noqa: F811
    with_two.test_an_interrupt_ends_the_cell(notebook, tmp_path, "a collective", "stop button")


def test_a_killed_engine_ends_the_cell(notebook: Notebook, tmp_path: Path) -> None:  # noqa: F811
    with_two.test_a_killed_engine_ends_the_cell(notebook, tmp_path, "dist.all_reduce(torch.ones(3))", workers=False)
