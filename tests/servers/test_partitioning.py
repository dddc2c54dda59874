"""The number and sizes of a variable's shards."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

import distnb
from distnb.errors import OptionError
from distnb.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner, Partitioner
from distnb.variables.partitioning import checked_shards, shard_sizes

SHAPES = [(rows, columns) for rows in (2, 3, 5, 10, 13, 64, 1024) for columns in (1, 3, 16)]


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        (FixedShardsPartitioner(2), (10, 3), 2),
        (FixedShardsPartitioner(7), (3, 3), 3),
        (MinSizePartitioner(4, 2), (6, 1), 2),
        (MinSizePartitioner(4, 10), (6, 1), 6),
        (MinSizePartitioner(8, 10), (6, 1), 3),
        (MinSizePartitioner(16, 10), (6, 1), 1),  # TensorFlow: 2, of 12 bytes
        (MinSizePartitioner(25, 10), (6, 1), 1),
        (MinSizePartitioner(), (1 << 20, 4), 1),
        (MinSizePartitioner(256 << 10, 2), (1024, 1024), 2),
        (MaxSizePartitioner(4), (6, 1), 6),
        (MaxSizePartitioner(4, 2), (6, 1), 2),
        (MaxSizePartitioner(1024), (6, 1), 1),
        (MaxSizePartitioner(8), (5, 1), 3),
        (MaxSizePartitioner(1), (6, 5), 6),  # a row is larger
        (MaxSizePartitioner(8), (5, 0), 1),
    ],
)
def test_the_number_of_shards_follows_the_partitioner(partitioner: Partitioner, shape: tuple[int, ...], shards: int):
    assert partitioner(shape, torch.float32) == [shards, 1]
    assert partitioner(torch.Size(shape), np.dtype("float32")) == [shards, 1]
    assert checked_shards(partitioner, shape, torch.float32) == shards
    assert partitioner(shape[::-1], torch.float32, axis=1) == [1, shards]
    assert partitioner(shape[::-1], torch.float32, axis=-1) == [1, shards]


def test_the_size_of_an_element_affects_the_number_of_shards():
    assert [MaxSizePartitioner(8)((8,), dtype) for dtype in (torch.int8, torch.float16, torch.int64)] == [[1], [2], [8]]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(13, (3, 3, 3, 2, 2)), (10, (2, 2, 2, 2, 2)), (5, (1, 1, 1, 1, 1)), (7, (2, 2, 1, 1, 1))],
)
def test_rows_are_divided_into_five_shards(rows: int, sizes: tuple[int, ...]):
    assert shard_sizes(rows, 5) == sizes


def test_the_first_shards_are_the_larger_ones():
    assert shard_sizes(10, 4) == (3, 3, 2, 2)
    for rows, shards in itertools.product(range(1, 40), range(1, 10)):
        sizes = shard_sizes(rows, shards)
        assert (len(sizes), sum(sizes)) == (shards, rows)
        assert list(sizes) == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_keep_to_their_limits(shape: tuple[int, int]):
    total, row = math.prod(shape) * 4, shape[1] * 4
    for nbytes, most in itertools.product([1, 7, 64, 100, 4096], [1, 3, 100]):
        fewest = MinSizePartitioner(nbytes, most)(shape, torch.float32)[0]
        assert 1 <= fewest <= min(most, shape[0])
        assert fewest == 1 or total / fewest >= nbytes
        assert fewest == min(most, shape[0]) or total / (fewest + 1) < nbytes  # one more shard would be too many
        many = MaxSizePartitioner(nbytes)(shape, torch.float32)[0]
        assert shard_sizes(shape[0], many)[0] * row <= max(nbytes, row)
        assert many == 1 or shard_sizes(shape[0], many - 1)[0] * row > nbytes  # one shard less would be too few
        assert MaxSizePartitioner(nbytes, most)(shape, torch.float32)[0] == min(many, most)


def test_scalars_and_single_rows_are_not_divided_and_call_no_partitioner():
    def never(shape: object, dtype: object) -> list[int]:
        raise AssertionError("asked")

    for shape in ((), (1,), (1, 8), (0, 8)):
        assert checked_shards(never, shape, torch.float32) == 1
    assert FixedShardsPartitioner(3)((1, 8), torch.float32) == [1, 1]
    assert FixedShardsPartitioner(3)((0, 8), torch.float32) == [1, 1]


@pytest.mark.parametrize("given", [None, 0, 2, [], [0, 1], [2], [2, 1], (4, 1)])
def test_a_custom_callable_is_called_by_keyword(given: object):
    asked = []

    def partitioner(*, shape: object, dtype: object) -> object:
        asked.append((shape, dtype))
        return given

    if isinstance(given, list | tuple) and given and given[0]:
        assert checked_shards(partitioner, (4, 3), torch.float32) == given[0]
    else:
        with pytest.raises(ValueError, match=r"variable_partitioner returned .* 1 to 4 along the first"):
            checked_shards(partitioner, (4, 3), torch.float32)
    assert asked == [((4, 3), torch.float32)]


@pytest.mark.parametrize("given", [[2, 2], [1, 3], [5, 1], [-1, 1], [2.0, 1], [True, 1], ["2", 1], "2", [None, 1]])
def test_wrong_results_of_a_partitioner_are_refused(given: object):
    with pytest.raises(OptionError, match="variable_partitioner returned"):
        checked_shards(lambda shape, dtype: given, (4, 3), torch.float32)


def test_a_custom_partitioner_overrides_shards():
    class Halves(Partitioner):
        def shards(self, rows: int, row_nbytes: int) -> int:
            return rows // 2

    assert Halves()((9, 2), torch.float32) == [4, 1]
    assert Halves()((1, 2), torch.float32) == [1, 1]
    with pytest.raises(NotImplementedError, match="override `shards`"):
        Partitioner()((9, 2), torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedShardsPartitioner(0),
        lambda: FixedShardsPartitioner(2.0),  # type: ignore[arg-type]
        lambda: FixedShardsPartitioner(True),
        lambda: MinSizePartitioner(min_shard_bytes=0),
        lambda: MinSizePartitioner(max_shards=0),
        lambda: MaxSizePartitioner(0),
        lambda: MaxSizePartitioner(4, max_shards=0),
        lambda: FixedShardsPartitioner(2)((4,), torch.float32, axis=1),
        lambda: FixedShardsPartitioner(2)((), torch.float32),
        lambda: FixedShardsPartitioner(2)((4,), "float32"),
        lambda: FixedShardsPartitioner(2)((4,), np.float32),
    ],
)
def test_unsupported_arguments_are_refused(make):
    with pytest.raises(OptionError):
        make()


def test_partitioners_compare_by_value():
    made = [FixedShardsPartitioner(2), MinSizePartitioner(4, 2), MaxSizePartitioner(4), MaxSizePartitioner(4, 2)]
    assert len(set(made)) == 4
    for each in made:
        again = pickle.loads(pickle.dumps(each))
        assert again == each
        assert hash(again) == hash(each)
        assert eval(repr(each)) == each
    assert FixedShardsPartitioner(num_shards=3) == FixedShardsPartitioner(3) != FixedShardsPartitioner(2)


def test_partitioners_are_also_available_under_tensorflows_name():
    assert distnb.experimental.partitioners is distnb.partitioners
    assert distnb.partitioners.MinSizePartitioner is MinSizePartitioner
