"""Plain tensors, many at a time. Data sets have thousands of small ones.

A property is read from all tensors before the next property. This takes a third of the time of reading all properties
of one tensor after the other.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, lt
from typing import Any, NamedTuple

import xxhash

from distnb.objects.memory.blocks import BYTES_AT, PLAIN_DTYPES, MemoryBlocks, TensorBatch, plain_memory
from distnb.objects.memory.received_memory import WATCHED_NBYTES, digest_at

__all__ = ["PlainTensors", "batches_of", "bytes_and_shapes", "digests_of", "open_batch", "plain_among"]

_MOST_NBYTES = 64 << 10
"""The size in bytes of the largest tensor of a batch. A larger one has a buffer of its own."""


class PlainTensors(NamedTuple):
    """Plain tensors and their memory.

    Attributes:
        tensors: The tensors.
        dtypes, shapes: The dtype and the shape of each tensor.
        addresses, sizes: The address and the size in bytes of each tensor.
    """

    tensors: list[Any]
    dtypes: list[Any]
    shapes: list[Sequence[int]]
    addresses: list[int]
    sizes: list[int]


def plain_among(tensors: list[Any]) -> PlainTensors:
    """Return those tensors that are plain (see `plain_memory`), in their order."""
    found = _all_plain(tensors)
    if found is None:
        plain = [tensor for tensor in tensors if plain_memory(tensor) is not None]
        found = _all_plain(plain)
        assert found is not None
    return found


def _all_plain(tensors: list[Any]) -> PlainTensors | None:
    """Return the tensors with their memory, or None if one of them is not plain."""
    import torch

    kind, storage = torch.Tensor, torch.UntypedStorage
    dtypes = list(map(attrgetter("dtype"), tensors))
    if any(PLAIN_DTYPES[dtype] is None for dtype in set(dtypes)) or not all(map(attrgetter("is_cpu"), tensors)):
        return None
    if any(map(attrgetter("requires_grad"), tensors)) or any(map(attrgetter("is_nested"), tensors)):
        return None
    try:
        addresses, sizes = list(map(kind.data_ptr, tensors)), list(map(attrgetter("nbytes"), tensors))
    except (RuntimeError, NotImplementedError):  # one of them has no memory of its own
        return None
    if not all(addresses) or any(map(kind.is_neg, tensors)) or not all(map(kind.is_contiguous, tensors)):
        return None
    if any(map(attrgetter("__dict__"), tensors)) or set(map(attrgetter("grad"), tensors)) - {None}:
        return None
    offsets, ends = list(map(kind.storage_offset, tensors)), sizes
    if any(offsets):
        itemsizes = map(attrgetter("itemsize"), tensors)
        ends = [offset * itemsize + nbytes for offset, itemsize, nbytes in zip(offsets, itemsizes, sizes, strict=True)]
    capacities = map(storage.nbytes, map(kind.untyped_storage, tensors))
    if any(map(lt, capacities, ends)):
        return None
    return PlainTensors(tensors, dtypes, list(map(attrgetter("shape"), tensors)), addresses, sizes)


def digests_of(plain: PlainTensors) -> tuple[list[bytes], bytes]:
    """Return the digest of each tensor's elements, and all dtypes and shapes as bytes."""
    windows = zip(plain.sizes, plain.addresses, strict=True)
    if max(plain.sizes, default=0) < WATCHED_NBYTES:
        digests = [xxhash.xxh3_128_digest(BYTES_AT[nbytes](address)) for nbytes, address in windows]
    else:
        digests = [digest_at(address, nbytes) for nbytes, address in windows]
    one = len(set(plain.dtypes)) == 1
    dtypes = ",".join(str(PLAIN_DTYPES[dtype]) for dtype in (plain.dtypes[:1] if one else plain.dtypes))
    ranks, lengths = array("q", map(len, plain.shapes)), array("q", chain.from_iterable(plain.shapes))
    return digests, b"".join((dtypes.encode(), ranks, lengths))


def batches_of(tensors: Sequence[Any], memories: MemoryBlocks) -> list[TensorBatch]:
    """Divide plain tensors into batches, one for each dtype. Larger tensors, and those that share memory, are left out.

    Two tensors share memory if they have the same storage. Arrays do not share it as long as torch can resize it.
    """
    import torch

    from distnb.compat.torch_internals import identity_of_storage

    storages = list(map(torch.Tensor.untyped_storage, tensors))
    identities = list(map(identity_of_storage, storages))
    unlike = memories.are_known(identities)
    if len(set(identities)) < len(identities):
        unlike |= {identity for identity, count in Counter(identities).items() if count > 1}
    batches: dict[Any, tuple[list[Any], list[int]]] = {}
    facts = zip(tensors, identities, map(torch.UntypedStorage.nbytes, storages), storages, strict=True)
    for tensor, identity, nbytes, storage in facts:
        if nbytes <= _MOST_NBYTES and tensor.nbytes == nbytes and identity not in unlike and storage.resizable():
            several, its_identities = batches.setdefault(tensor.dtype, ([], []))
            several.append(tensor)
            its_identities.append(identity)
    return [TensorBatch(*each) for dtype, each in batches.items() if dtype in _dtypes()]


@functools.cache
def _dtypes() -> frozenset[Any]:
    """Return the dtypes whose tensors torch can make from one buffer."""
    import torch

    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return frozenset((*floats, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))


def bytes_and_shapes(batch: TensorBatch) -> tuple[bytes, list[tuple[int, ...]]]:
    """Return the elements of a batch's tensors as bytes, and the shapes."""
    windows = [BYTES_AT[tensor.nbytes](tensor.data_ptr()) for tensor in batch]
    shapes: dict[Any, tuple[int, ...]] = {}  # equal shapes are one object, which is pickled once
    return b"".join(windows), [shapes.setdefault(shape, tuple(shape)) for shape in map(attrgetter("shape"), batch)]


def open_batch(data: Any, dtype: Any, shapes: list[tuple[int, ...]]) -> TensorBatch:
    """Make the tensors of a batch, each with memory of its own."""
    import torch

    view = memoryview(data)
    whole = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)
    lengths = {shape: math.prod(shape) for shape in set(shapes)}
    tensors: Any = torch.ops.aten.split_with_sizes_copy(whole, list(map(lengths.__getitem__, shapes)))
    for tensor, shape in zip(tensors, shapes, strict=True):
        if len(shape) != 1:
            tensor.resize_(shape)
    return TensorBatch(tensors)
