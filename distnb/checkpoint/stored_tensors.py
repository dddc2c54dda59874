"""Tensors in files, of which only the requested elements are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from distnb.errors import CheckpointError

__all__ = ["StoredTensor", "whole"]


class StoredTensor:
    """A tensor in one or several files. Its content is read on request, also in part.

    It is an ordinary class, because a dataclass would be a container in structures.

    Args:
        name: The tensor's name, for errors.
        parts: The place of each part in the whole, and the part in the memory of its mapped file.

    Attributes:
        shape: The shape of the whole tensor.

    Raises:
        CheckpointError: A part is missing.
    """

    __slots__ = ("_parts", "name", "shape")

    def __init__(self, name: str, parts: Sequence[tuple[Sequence[int], torch.Tensor]]) -> None:
        self.name = name
        self._parts = tuple(parts)
        ends = [[first + size for first, size in zip(offset, part.shape, strict=True)] for offset, part in parts]
        self.shape = tuple(map(max, zip(*ends, strict=True)))
        held = sum(part.numel() for _, part in parts)
        if held != math.prod(self.shape):
            raise CheckpointError(
                f"{name!r} is not complete: its parts hold {held} of {math.prod(self.shape)} elements."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self._parts[0][1].dtype

    def as_complex(self) -> StoredTensor:
        """Return the tensor with its last axis as real and imaginary parts."""
        return StoredTensor(self.name, [(offset[:-1], torch.view_as_complex(part)) for offset, part in self._parts])

    def read(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return a part of the tensor, or all of it, in new memory. Nothing else is read.

        Args:
            offset: The place of the part in the whole; None: its beginning.
            shape: The shape of the part; None: everything.
        """
        first = offset if offset is not None else [0] * len(self.shape)
        tensor = torch.empty(tuple(shape if shape is not None else self.shape), dtype=self.dtype, device="cpu")
        for place, part in self._parts:
            begins = [max(a, b) for a, b in zip(first, place, strict=True)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(first, tensor.shape, place, part.shape, strict=True)]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                tensor[_window(begins, ends, first)] = part[_window(begins, ends, place)]
        return tensor

    def map(self) -> torch.Tensor:
        """Return the tensor, in the memory of the mapped file if possible. Copy it to keep it."""
        return self._parts[0][1] if len(self._parts) == 1 else self.read()


def _window(begins: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - o, end - o) for begin, end, o in zip(begins, ends, origin, strict=True))


def whole(leaf: Any) -> Any:
    """Return a tensor in files as a tensor; return anything else as it is."""
    return leaf.map() if isinstance(leaf, StoredTensor) else leaf
