"""Descriptions of engine objects in the notebook."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distnb.engine.namespace.descriptions import summarise


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            torch.nn.Linear(2, 1).state_dict(),
            "OrderedDict({'bias': <Tensor (1,) float32>, 'weight': <Tensor (1, 2) float32>})",
        ),
        ([np.ones(3), torch.tensor(1.5)], "[<ndarray (3,) float64>, tensor(1.5000)]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, ...]"),
    ],
)
def test_containers_show_their_contents(value: object, text: str) -> None:
    assert summarise(value).text == text
