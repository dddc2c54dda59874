"""Sequences of cells on a notebook and engines in one process, compared name by name with one IPython."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distnb.notebook.handles.handle import HANDLES
from tests.support.sequences import SEQUENCES
from tests.support.value_sequences import CHANGED_BY_ONE, KINDS
from tests.support.worlds import Cell, DoubleWorld, PlainWorld, compare, compare_results, modes_kept, run_all


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("replicas", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3))])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_of_cells_behave_as_in_one_ipython(name: str, replicas: int) -> None:
    _run_both(SEQUENCES[name], replicas, compare)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", KINDS)
def test_values_of_every_kind_return(name: str) -> None:
    _run_both(KINDS[name], 2, compare_results)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", CHANGED_BY_ONE)
def test_a_change_by_one_replica_is_everybodys(name: str, replicas: int) -> None:
    double = _run_both(CHANGED_BY_ONE[name], replicas, compare)
    assert [name for name, value in double.names().items() if isinstance(value, HANDLES)] == []
    assert double.notices == []


def _run_both(cells: list[Cell], replicas: int, compared: Callable[[Any, Any], None]) -> DoubleWorld:
    plain = PlainWorld()
    with modes_kept():
        run_all(plain, cells)
    double = DoubleWorld(replicas)
    with modes_kept():
        run_all(double, cells)
    compared(plain.names(), double.names())
    return double
