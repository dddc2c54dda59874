"""Division of a variable into shards: their number and their rows. Loads no torch.

A shard is a range of consecutive rows: variables are divided along their first axis.
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
    """Base class of the partitioners. Override `shards`, or the call itself, in your own.

    Any callable that takes `shape` and `dtype`, and returns the same as this, is a partitioner too.
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis: 1 along all but `axis`.

        Args:
            shape: The variable's shape.
            dtype: The variable's dtype, of torch or NumPy.
            axis: The axis to divide. The strategy always divides the first one.

        Raises:
            OptionError: There is no such axis, or `dtype` is not a dtype. (It is a ValueError.)
        """
        counts = [1] * len(shape)
        if not -len(shape) <= axis < len(shape):
            raise OptionError(f"axis={axis!r}: a variable of shape {tuple(shape)} has {len(shape)} axes. Leave it out.")
        itemsize = getattr(dtype, "itemsize", None)
        if not isinstance(itemsize, int):
            raise OptionError(f"dtype={dtype!r} is not a dtype of torch or NumPy. Give one, such as torch.float32.")
        rows = shape[axis]
        counts[axis] = max(1, min(rows, self.shards(rows, math.prod(shape) // max(1, rows) * itemsize)))
        return counts

    def shards(self, rows: int, row_nbytes: int) -> int:
        """Return the desired number of shards. The call limits it to 1 … rows.

        Args:
            rows: The number of elements along the axis to divide.
            row_nbytes: The size of each element in bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} must override `shards`, or the call.")


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """A partitioner that makes a fixed number of shards, or one per row if there are fewer rows.

    Raises:
        OptionError: `num_shards` is not a positive whole number.

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
    """A partitioner that makes as many shards as possible with a mean size of at least `min_shard_bytes`.

    If the rows do not divide evenly, the smaller shards have one row less than the larger ones.

    Args:
        min_shard_bytes: The smallest mean size of a shard in bytes.
        max_shards: The largest number of shards.

    Raises:
        OptionError: One of the arguments is not a positive whole number.

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
    """A partitioner that makes the fewest shards of at most `max_shard_bytes`, or of one row.

    Args:
        max_shard_bytes: The largest size of a shard in bytes.
        max_shards: The largest number of shards, which may then be larger than `max_shard_bytes`; None for no limit.

    Raises:
        OptionError: One of the arguments is not a positive whole number.

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
    """Return the number of rows of each shard. If the rows do not divide evenly, the first shards have one more.

    Example:
        >>> shard_sizes(13, 5)
        (3, 3, 3, 2, 2)
    """
    least, more = divmod(rows, shards)
    return (least + 1,) * more + (least,) * (shards - more)


def checked_shards(partitioner: Callable[..., Any], shape: Sequence[int], dtype: Any) -> int:
    """Return the number of shards that a partitioner, perhaps a user's own, gives a variable.

    A variable without axes, or with fewer than two rows, has one shard, and the partitioner is not called.

    Raises:
        OptionError: The partitioner did not return a list with a number of shards, from 1 to the number of rows, for
            the first axis and 1 for each other axis. (It is a ValueError.)
    """
    if not shape or shape[0] < 2:
        return 1
    given = partitioner(shape=shape, dtype=dtype)
    counts = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not counts or not all(map(_is_count, counts)) or counts[0] > shape[0] or any(each != 1 for each in counts[1:]):
        raise OptionError(
            f"The variable_partitioner returned {given!r} for a variable of shape {tuple(shape)}. It must return "
            f"the list of the number of shards per axis: 1 to {shape[0]} along the first, and 1 along each other axis."
        )
    return int(counts[0])


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _check_positive(name: str, number: Any) -> None:
    if not _is_count(number):
        raise OptionError(f"{name}={number!r}: give a whole number, 1 or more.")
