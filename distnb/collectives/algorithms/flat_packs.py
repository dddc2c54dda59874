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
_KNOWN_PLACES = 4  # where a pack's tensors are written in turn


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

    `wire` is what is sent: the flat tensor, as real numbers where it is complex. The first extra elements show for each
    slot whether there was a tensor. The rest of them, and the gaps between the views, have no meaning.
    """

    def __init__(self, slots: Sequence[Slot], extra: int = 0) -> None:
        dtype = slots[0].dtype
        step = max(1, _ALIGNMENT // dtype.itemsize)
        offsets = []
        end = 0
        for slot in slots:
            offsets.append(end)
            end += -(-slot.numel // step) * step
        self._slots, self._offsets, self._end = slots, offsets, end
        self.flat = torch.zeros(end + extra, dtype=dtype, device=slots[0].device)
        self.wire = torch.view_as_real(self.flat) if dtype.is_complex else self.flat
        self.views, self.extra = self._cut(self.flat)
        self._elsewhere: dict[int, tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]] = {}

    def _cut(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the view of each slot and of the extra elements in a flat tensor."""
        with torch.no_grad():
            views = [
                flat[offset : offset + slot.numel].view(slot.shape)
                if slot.stride is None
                else flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + offset)
                for slot, offset in zip(self._slots, self._offsets, strict=True)
            ]
            return views, flat[self._end :]

    def _place(self, wire: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Return the flat tensor, the views and the extra elements of this pack, or of other memory like `wire`."""
        if wire is None or wire is self.wire:
            return self.flat, self.views, self.extra
        place = self._elsewhere.get(wire.data_ptr())
        if place is None:
            flat = torch.view_as_complex(wire) if self.flat.is_complex() else wire
            if len(self._elsewhere) >= _KNOWN_PLACES:
                self._elsewhere.clear()
            place = self._elsewhere[wire.data_ptr()] = (flat, *self._cut(flat))
        return place

    def fill(
        self, tensors: Sequence[torch.Tensor | None], scale: float = 1.0, wire: torch.Tensor | None = None
    ) -> bool:
        """Write one tensor into each view, multiplied by a scale (0 writes zeros even for NaN), and zeros for None.

        Args:
            wire: Memory of the size of the pack's `wire`, to which the tensors are written instead.

        Returns:
            Whether there was a tensor for every view.
        """
        flat, views, extra = self._place(wire)
        present = [tensor for tensor in tensors if tensor is not None]
        complete = len(present) == len(views)
        with torch.no_grad():
            if scale == 0.0 or not present:
                flat.zero_()
            elif complete:
                torch_internals.copy_each(views, present)
            else:
                pairs = list(zip(views, tensors, strict=True))
                torch_internals.zero_each([view for view, tensor in pairs if tensor is None])
                torch_internals.copy_each([view for view, tensor in pairs if tensor is not None], present)
            if scale not in (0.0, 1.0):
                flat.mul_(scale)
            if complete:
                extra.fill_(1)
            else:
                flags = [0.0 if tensor is None else 1.0 for tensor in tensors]
                extra[: len(flags)].copy_(torch.tensor(flags, dtype=torch.float32))
        return complete
