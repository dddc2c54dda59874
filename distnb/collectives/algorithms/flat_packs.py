"""Flat packs of tensors that are sent together: their division into messages, and the layout of one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distnb.compat import torch_internals

__all__ = ["Pack", "Packs", "Slot"]

# Multi-tensor kernels read 16 bytes at a time: every view starts on such a boundary.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Packs:
    """The rule that closes a pack, so that the next tensor begins another. By default one pack holds all tensors."""

    nbytes: int | None = None
    """Once it holds so much."""
    count: int | None = None
    """The number of packs: each closes once it holds its share. With 0 each tensor has a pack of its own."""

    @classmethod
    def larger_than(cls, nbytes: int) -> Packs:
        """Return the rule that closes a pack once it is larger than this number of bytes; 0 means one pack."""
        return cls(nbytes=nbytes + 1) if nbytes else cls()

    def cut(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return the places of tensors of these sizes, pack by pack, in order."""
        limit = self.nbytes
        if limit is None and self.count is not None:
            limit = -(-sum(sizes) // self.count) if self.count else 0
        packs: list[list[int]] = [[]]
        held = 0
        for place, size in enumerate(sizes):
            if limit is not None and held >= limit and packs[-1]:
                packs.append([])
                held = 0
            packs[-1].append(place)
            held += size
        return packs if sizes else []


@dataclass(frozen=True)
class Slot:
    """The layout of one tensor of a pack, the same on every replica. Without a stride it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None = None
    sparse: bool = False

    @classmethod
    def like(cls, tensor: torch.Tensor, *, sparse: bool = False) -> Slot:
        """Return the slot of a tensor, in its own layout (channels_last, say) if it fills one stretch of memory."""
        stride = tensor.stride() if _is_dense(tensor) else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, stride, sparse)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.numel * self.dtype.itemsize


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


class Pack:
    """A flat tensor, a view of it for each slot (all of one dtype and device), and one of extra elements that follow.

    `wire` is what is sent: the flat tensor, as real numbers where it is complex.
    """

    def __init__(self, slots: Sequence[Slot], extra: int = 0) -> None:
        dtype = slots[0].dtype
        step = max(1, _ALIGNMENT // dtype.itemsize)
        offsets = []
        end = 0
        for slot in slots:
            offsets.append(end)
            end += -(-slot.numel // step) * step
        with torch.no_grad():
            # Zeros, so that the gaps between the views add up to zero and never to a signalling NaN.
            self.flat = torch.zeros(end + extra, dtype=dtype, device=slots[0].device)
            self.wire = torch.view_as_real(self.flat) if dtype.is_complex else self.flat
            self.views = [
                self.flat[offset : offset + slot.numel].view(slot.shape)
                if slot.stride is None
                else self.flat.as_strided(slot.shape, slot.stride, offset)
                for slot, offset in zip(slots, offsets, strict=True)
            ]
            self.extra = self.flat[end:]

    def fill(self, tensors: Sequence[torch.Tensor | None], scale: float = 1.0) -> bool:
        """Write one tensor into each view, multiplied by a scale (0 writes zeros even for NaN), and zeros for None.

        Returns:
            Whether there was a tensor for every view.
        """
        present = [tensor for tensor in tensors if tensor is not None]
        complete = len(present) == len(self.views)
        with torch.no_grad():
            if scale == 0.0 or not present:
                self.flat.zero_()
            elif complete:
                torch_internals.copy_each(self.views, present)
            else:
                pairs = list(zip(self.views, tensors, strict=True))
                torch_internals.zero_each([view for view, tensor in pairs if tensor is None])
                torch_internals.copy_each([view for view, tensor in pairs if tensor is not None], present)
            if scale not in (0.0, 1.0):
                self.flat.mul_(scale)
        return complete
