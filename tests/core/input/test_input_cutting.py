"""Cutting of global batches: sizes, structures, errors."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from distnb.errors import StructureError
from distnb.input.cutting import count_examples, cut, map_leaves, slice_bounds
from tests.support.batches import split_batch

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    name: list[str]


@pytest.mark.parametrize(
    ("n", "replicas", "sizes"),
    [
        (8, 3, [3, 3, 2]),
        (4, 3, [2, 1, 1]),
        (6, 4, [2, 2, 1, 1]),
        (6, 2, [3, 3]),
        (2, 4, [1, 1, 0, 0]),
        (0, 2, [0, 0]),
        (5, 1, [5]),
    ],
)
def test_slices_have_the_expected_sizes(n: int, replicas: int, sizes: list[int]) -> None:
    bounds = [slice_bounds(n, replicas, replica_id) for replica_id in range(replicas)]
    assert [stop - start for start, stop in bounds] == sizes
    assert [start for start, _ in bounds] == [sum(sizes[:replica_id]) for replica_id in range(replicas)]


def test_nested_structures_keep_their_types() -> None:
    batch = {
        "pair": Pair(torch.arange(4), torch.zeros(4, 2, dtype=torch.int8)),
        "names": ["a", "b", "c", "d"],
        "sample": Sample(torch.arange(4.0), ["s", "t", "u", "v"]),
        "more": OrderedDict(z=np.arange(8).reshape(4, 2), nothing=None),
        "labels": (1, 2, 3, 4),
    }
    first, second, third = split_batch(batch, 3)
    assert type(first["pair"]) is Pair
    assert first["pair"].x.tolist() == [0, 1]
    assert second["names"] == ["c"]
    assert type(third["sample"]) is Sample
    assert third["sample"].name == ["v"]
    assert type(third["more"]) is OrderedDict
    assert third["more"]["z"].tolist() == [[6, 7]]
    assert third["more"]["nothing"] is None
    assert first["labels"] == (1, 2)
    assert batch["names"] == ["a", "b", "c", "d"]


def test_empty_slices_keep_dtype_and_shape() -> None:
    batch = [torch.zeros(2, 3, dtype=torch.float64), {"y": np.zeros((2, 5), dtype=np.uint8)}, ["a", "b"]]
    x, nested, names = split_batch(batch, 3)[2]
    assert x.shape == (0, 3)
    assert x.dtype == torch.float64
    assert nested["y"].shape == (0, 5)
    assert nested["y"].dtype == np.uint8
    assert names == []


def test_as_many_fields_as_examples_are_recognised() -> None:
    x, y = torch.arange(2), torch.arange(2.0)
    first, _ = split_batch((x, y), 2)
    assert first == (torch.tensor([0]), torch.tensor([0.0]))
    first, _ = split_batch(((x, y), ["a", "b"]), 2)
    assert first == ((torch.tensor([0]), torch.tensor([0.0])), ["a"])
    assert split_batch((["a", "b"], ["c", "d"]), 2) == [(["a"], ["c"]), (["b"], ["d"])]


def test_lists_of_one_item_per_example_are_cut() -> None:
    images = tuple(torch.zeros(3, size, size) for size in (4, 5, 6))
    targets = tuple({"boxes": torch.zeros(count, 4)} for count in (1, 2, 0))
    for replica_images, replica_targets in (split_batch((images, targets), 2)[0], split_batch([images, targets], 2)[0]):
        assert [image.shape[1] for image in replica_images] == [4, 5]
        assert len(replica_targets) == 2
    assert split_batch(["ab", "cd", "ef"], 2) == [["ab", "cd"], ["ef"]]
    assert split_batch([{"a": 1}, {"a": 2}], 2) == [[{"a": 1}], [{"a": 2}]]
    assert split_batch({"id": range(3)}, 2)[1] == {"id": range(2, 3)}


def test_sparse_tensors_are_cut() -> None:
    batch = torch.eye(4).to_sparse()
    assert torch.equal(split_batch(batch, 2)[1].to_dense(), torch.eye(4)[2:])


def test_different_leading_dimensions_are_an_error() -> None:
    with pytest.raises(StructureError, match=r"batch\['y'\] has 3 entries along axis 0, while batch\['x'\] has 4"):
        split_batch({"x": torch.zeros(4), "y": torch.zeros(3)}, 2)
    with pytest.raises(StructureError, match=r"batch\[1\].name"):
        split_batch([torch.zeros(4), Sample(torch.zeros(4), ["a"])], 2)


@pytest.mark.parametrize("value", [3, 2.5, "train", torch.tensor(1.0), np.float32(1), np.array(2), True])
def test_unbatched_values_are_an_error(value: Any) -> None:
    with pytest.raises(StructureError, match=r"batch\['n'\] is .*never batched.*one entry per example"):
        split_batch({"x": torch.zeros(4), "n": value}, 2)
    with pytest.raises(StructureError, match="never batched"):
        split_batch(value, 2)


def test_batches_without_examples_are_cut() -> None:
    for empty in ({}, (), None, {"x": None}):
        with pytest.raises(StructureError, match="contains no tensor"):
            split_batch(empty, 2)


def test_slices_collated_separately_may_hold_any_value_per_example() -> None:
    seen: list[Any] = []
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    rows = torch.zeros(7, 6)
    map_leaves([torch.zeros(2, 3), rows, packed], 2, seen.append, own=True)
    assert [type(leaf) for leaf in seen] == [torch.Tensor, torch.Tensor, type(packed)]
    with pytest.raises(StructureError, match="never batched"):
        map_leaves([torch.zeros(2, 3), 7], 2, seen.append, own=True)


def test_examples_are_counted_and_cut() -> None:
    assert count_examples({"a": [torch.zeros(5, 2)], "b": ["x"] * 5}) == 5
    assert cut([1, 2, 3], 1, 3) == [2, 3]
