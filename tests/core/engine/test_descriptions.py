"""Descriptions of engine objects in the notebook."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distnb.engine.namespace.descriptions import summarise


class Uncomparable(torch.Tensor):
    """A tensor like a shard, whose comparison all replicas would have to compute together."""

    def __new__(cls) -> Uncomparable:
        return torch.tensor(2.0).as_subclass(cls)

    def __lt__(self, other: object) -> Any:
        pytest.fail("a member was compared")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            torch.nn.Linear(2, 1).state_dict(),
            "OrderedDict({'weight': <Tensor (1, 2) float32>, 'bias': <Tensor (1,) float32>})",
        ),
        ([np.ones(3), torch.tensor(1.5)], "[<ndarray (3,) float64>, tensor(1.5000)]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, ...]"),
        (dict.fromkeys("edcba", 1), "{'e': 1, 'd': 1, 'c': 1, 'b': 1, ...}"),
        ({Uncomparable(): {}}, "{Uncomparable(2.): {}}"),
        ({Uncomparable(), Uncomparable()}, "{Uncomparable(2.), Uncomparable(2.)}"),
    ],
)
def test_containers_show_their_contents(value: object, text: str) -> None:
    assert summarise(value).text == text
