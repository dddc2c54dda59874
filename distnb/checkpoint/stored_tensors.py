"""Tensors in safetensors files, of which only the requested elements are read.

8 bytes      the length of the header, little-endian
header       JSON: {"weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}, "__metadata__": {…}}
data         the tensors; offsets count from its beginning
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from distnb.errors import CheckpointError

__all__ = ["DTYPES", "FileHeader", "StoredPiece", "StoredTensor", "header_bytes", "parse_header", "whole"]

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes by their names in safetensors files."""

_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library


class StoredPiece(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        file: The path of the file.
        start: The position of the first element, in bytes.
        offset: The place of the part in the whole tensor.
        shape: The shape of the part.
    """

    file: str
    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FileHeader:
    """The header of a safetensors file.

    Attributes:
        tensors: The dtype, shape and (first, last) byte of each tensor, counted from the beginning of the file.
        metadata: Text by name.
        nbytes: The size of the file.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], tuple[int, int]]]
    metadata: Mapping[str, str]
    nbytes: int


def header_bytes(file: Path) -> bytes:
    """Return the part of a safetensors file before its tensors.

    Raises:
        CheckpointError: It is not a safetensors file.
    """
    with file.open("rb") as opened:
        beginning = opened.read(8)
        length = int.from_bytes(beginning, "little")
        text = opened.read(length) if len(beginning) == 8 and length <= _LONGEST_HEADER else b""
    if not text or len(text) != length:
        raise CheckpointError(f"{file} is not a safetensors file, or it is not complete: it has no header.")
    return beginning + text


def parse_header(file: Path, header: bytes) -> FileHeader:
    """Return the content of a header.

    Raises:
        CheckpointError: The header is invalid, or describes a tensor of an unknown dtype.
    """
    try:
        described = json.loads(header[8:])
        metadata = described.pop("__metadata__", {})
        tensors = {}
        for name, facts in described.items():
            first, last = (len(header) + offset for offset in facts["data_offsets"])
            dtype, shape = DTYPES.get(facts["dtype"], facts["dtype"]), tuple(facts["shape"])
            if dtype is torch.float4_e2m1fn_x2:
                shape = (*shape[:-1], shape[-1] // 2)  # torch counts pairs of numbers
            tensors[name] = dtype, shape, (first, last)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: its header is invalid ({error!r}).") from None
    for name, (dtype, shape, (first, last)) in tensors.items():
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{file} holds {name!r} of the dtype {dtype}, which distnb does not read.")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{file} is not a safetensors file: {name!r} does not have the size of its shape.")
    return FileHeader(tensors, metadata, max([len(header), *(last for _, _, (_, last) in tensors.values())]))


class StoredTensor:
    """A tensor in one or several files. Its content is read on request, also in part.

    It is an ordinary class, because a dataclass would be a container in structures.

    Args:
        name: The tensor's name, for errors.
        dtype: The dtype in the files.
        pieces: The parts, which cover the tensor.
        is_complex: Whether the last axis of the files holds real and imaginary parts.

    Raises:
        CheckpointError: A part is missing.
    """

    __slots__ = ("_dtype", "_extent", "_is_complex", "name", "pieces")

    def __init__(self, name: str, dtype: torch.dtype, pieces: Sequence[StoredPiece], is_complex: bool = False) -> None:
        self.name = name
        self.pieces = tuple(pieces)
        self._dtype = dtype
        ends = [[first + size for first, size in zip(each.offset, each.shape, strict=True)] for each in self.pieces]
        self._extent = tuple(map(max, zip(*ends, strict=True)))
        self._is_complex = is_complex
        held = sum(math.prod(each.shape) for each in self.pieces)
        if held != math.prod(self._extent):
            raise CheckpointError(
                f"{name!r} is not complete: its parts hold {held} of {math.prod(self._extent)} elements."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._extent[:-1] if self._is_complex else self._extent

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self._dtype.to_complex() if self._is_complex else self._dtype

    def __reduce__(self) -> tuple[type[StoredTensor], tuple[Any, ...]]:
        return type(self), (self.name, self._dtype, self.pieces, self._is_complex)

    def as_complex(self) -> StoredTensor:
        """Return the tensor with its last axis as real and imaginary parts."""
        return StoredTensor(self.name, self._dtype, self.pieces, is_complex=True)

    def read(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return a part of the tensor, or all of it, in new memory. Nothing else is read.

        Args:
            offset: The place of the part in the whole; None: its beginning.
            shape: The shape of the part; None: everything.
        """
        first = tuple(offset if offset is not None else [0] * len(self.shape))
        size = tuple(shape if shape is not None else self.shape)
        if not self._is_complex:
            return self._read(first, size)
        return torch.view_as_complex(self._read((*first, 0), (*size, 2)))

    def _read(self, first: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(size, dtype=self._dtype, device="cpu")
        if not tensor.numel():
            return tensor
        itemsize = self._dtype.itemsize
        # Bytes, because NumPy lacks some of torch's dtypes.
        received: Any = tensor.reshape(-1).view(torch.uint8).numpy().reshape(*size, itemsize)
        for piece in self.pieces:
            begins = [max(a, b) for a, b in zip(first, piece.offset, strict=True)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(first, size, piece.offset, piece.shape, strict=True)]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            mapped: Any = np.memmap(
                piece.file, np.uint8, "r", offset=piece.start, shape=(*piece.shape, itemsize)
            )  # only the pages that are copied are read
            received[_window(begins, ends, first)] = mapped[_window(begins, ends, piece.offset)]
        return tensor

    def map(self) -> torch.Tensor:
        """Return the tensor, in the memory of the mapped file if possible. Copy it to keep it."""
        piece, itemsize = self.pieces[0], self._dtype.itemsize
        count = math.prod(self._extent)
        if len(self.pieces) > 1 or not count or piece.start % itemsize:
            return self.read()
        before = piece.start % mmap.ALLOCATIONGRANULARITY
        with open(piece.file, "rb") as opened:
            # Writable, which torch requires although nothing writes to it.
            mapped = mmap.mmap(
                opened.fileno(), before + count * itemsize, access=mmap.ACCESS_COPY, offset=piece.start - before
            )
        tensor = torch.frombuffer(mapped, dtype=self._dtype, count=count, offset=before).view(self._extent)
        return torch.view_as_complex(tensor) if self._is_complex else tensor


def _window(begins: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - o, end - o) for begin, end, o in zip(begins, ends, origin, strict=True))


def whole(leaf: Any) -> Any:
    """Return a tensor in files as a tensor; return anything else as it is."""
    return leaf.map() if isinstance(leaf, StoredTensor) else leaf
