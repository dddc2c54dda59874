"""Into how many shards a variable is divided, and which rows each shard has. Nothing here loads torch.

A shard is some consecutive rows: variables are divided along their first axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distnb.errors import OptionError

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "checked_shards",
    "shard_sizes",
]


class Partitioner:
    """Base of the partitioners. One of your own overrides `shards`, or the call itself.

    Any callable that takes `shape` and `dtype`, and returns what this does, is a partitioner too.
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """The number of shards along each axis: 1 along all but `axis`.

        Args:
            shape: The variable's.
            dtype: The variable's, of torch or NumPy.
            axis: The axis that is divided. The strategy divides the first one, and asks for no other.

        Raises:
            OptionError: There is no such axis, or this is no dtype. (It is a ValueError.)
        """
        counts = [1] * len(shape)
        if not -len(shape) <= axis < len(shape):
            raise OptionError(f"axis={axis!r}: a variable of shape {tuple(shape)} has {len(shape)} axes. Leave it out.")
        itemsize = getattr(dtype, "itemsize", None)
        if not isinstance(itemsize, int):
            raise OptionError(f"dtype={dtype!r} is no dtype of torch or NumPy. Give one, such as torch.float32.")
        rows = shape[axis]
        counts[axis] = max(1, min(rows, self.shards(rows, math.prod(shape) // max(1, rows) * itemsize)))
        return counts

    def shards(self, rows: int, row_nbytes: int) -> int:
        """How many shards there should be; the call cuts the number to 1 … rows.

        Args:
            rows: Elements along the axis that is divided.
            row_nbytes: Size of each.
        """
        raise NotImplementedError(f"{type(self).__name__} has to override `shards`, or the call.")


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """So many shards, or as many as there are rows.

    Raises:
        OptionError: `num_shards` is no positive whole number.

    Example:
        >>> import numpy as np
        >>> FixedShardsPartitioner(2)((10, 3), np.dtype("float32"))
        [2, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_positive("num_shards", self.num_shards)

    def shards(self, rows: int, row_nbytes: int) -> int:
        return self.num_shards


@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """As many shards as the variable has multiples of a size, which is then their mean size or less.

    Where the rows do not divide evenly, the smaller shards have one row less than the larger ones.

    Args:
        min_shard_bytes: The size.
        max_shards: The most shards.

    Raises:
        OptionError: One of them is no positive whole number.

    Example:
        >>> import numpy as np
        >>> MinSizePartitioner(min_shard_bytes=8, max_shards=10)((6, 1), np.dtype("float32"))
        [3, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _check_positive("min_shard_bytes", self.min_shard_bytes)
        _check_positive("max_shards", self.max_shards)

    def shards(self, rows: int, row_nbytes: int) -> int:
        return min(self.max_shards, rows * row_nbytes // self.min_shard_bytes)


@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as there can be that have at most a size, or one row.

    Args:
        max_shard_bytes: The size.
        max_shards: The most shards, which may then be larger; None for no limit.

    Raises:
        OptionError: One of them is no positive whole number.

    Example:
        >>> import numpy as np
        >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), np.dtype("float32"))
        [3, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _check_positive("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _check_positive("max_shards", self.max_shards)

    def shards(self, rows: int, row_nbytes: int) -> int:
        needed = -(-rows // max(1, self.max_shard_bytes // max(1, row_nbytes)))
        return needed if self.max_shards is None else min(self.max_shards, needed)


def shard_sizes(rows: int, shards: int) -> tuple[int, ...]:
    """How many rows each shard has: the first ones have one more where the rows do not divide evenly.

    Example:
        >>> shard_sizes(13, 5)
        (3, 3, 3, 2, 2)
    """
    least, more = divmod(rows, shards)
    return (least + 1,) * more + (least,) * (shards - more)


def checked_shards(partitioner: Callable[..., Any], shape: Sequence[int], dtype: Any) -> int:
    """How many shards a partitioner, perhaps a user's own, gives a variable.

    A variable without axes, or of fewer than two rows, has one shard: the partitioner is not asked.

    Raises:
        OptionError: It gave something else than a list of a number of shards, from 1 to the number of rows, along the
            first axis, and 1 along each other axis. (It is a ValueError.)
    """
    if not shape or shape[0] < 2:
        return 1
    given = partitioner(shape=shape, dtype=dtype)
    counts = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not counts or not all(map(_is_count, counts)) or counts[0] > shape[0] or any(each != 1 for each in counts[1:]):
        raise OptionError(
            f"The variable_partitioner gave {given!r} for a variable of shape {tuple(shape)}. It has to give a list of "
            f"the number of shards along each axis: 1 to {shape[0]} along the first one, and 1 along each other one."
        )
    return int(counts[0])


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _check_positive(name: str, number: Any) -> None:
    if not _is_count(number):
        raise OptionError(f"{name}={number!r}: give a whole number, 1 or more.")
