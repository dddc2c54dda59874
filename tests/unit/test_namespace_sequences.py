"""Sequences of cells on a notebook and engines in one process, compared name by name with one IPython."""

from __future__ import annotations

import pytest
import torch

from tests.sequences import SEQUENCES
from tests.worlds import DoubleWorld, PlainWorld, compare, modes_kept, run_all


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("replicas", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3))])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_of_cells_behave_as_in_one_ipython(name: str, replicas: int) -> None:
    cells = SEQUENCES[name]
    plain = PlainWorld()
    with modes_kept():
        run_all(plain, cells)
    double = DoubleWorld(replicas)
    with modes_kept():
        run_all(double, cells)
    compare(plain.names(), double.names())
