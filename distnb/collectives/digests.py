"""Digests: numbers that are equal for equal contents, by which replicas compare their values."""

from __future__ import annotations

import torch
import xxhash

from distnb.compat import torch_internals
from distnb.objects.memory.blocks import bytes_of

__all__ = ["digest", "digest_of_text"]


def digest(tensor: torch.Tensor) -> int:
    """Return a digest of 63 bits of a tensor's elements, the same on every device and for every memory layout.

    Of a DTensor, the elements of this process's part are digested.
    """
    part = torch_internals.local_tensor(tensor)
    tensor = tensor if part is None else part
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return xxhash.xxh3_64_intdigest(bytes_of(dense.cpu().contiguous())) >> 1


def digest_of_text(text: str) -> int:
    """Return a digest of 63 bits of a text. Unlike `hash`, it is the same in every process."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
