"""One flat tensor that holds many gradients: what travels in one collective.

A `Pack` is laid out once and used for as long as the layout lives. Its views become the parameters'
`.grad`, so nothing is copied back. A user may keep a gradient for longer than a step, so a pack is
written again only while nobody else holds one of its views or shares its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distnb.collectives.gradients.aggregated import aggregated

__all__ = ["Pack", "PackPool", "Slot"]

# Multi-tensor kernels read 16 bytes at a time: every view starts on such a boundary.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Slot:
    """Where one gradient goes: what it looks like, the same on every replica."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.numel * self.dtype.itemsize

    def describe(self) -> str:
        """The slot in an error message: `float32[64, 10]`."""
        kind = " sparse" if self.sparse else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{kind}"


class Pack:
    """A flat tensor, a view of it for each slot, and two tails: which slots are used, and a weight.

    Args:
        slots: What it holds.
        salt: So many elements are added at the end. Packs of different salt cannot be taken for each other when
            replicas reduce them in different order: their sizes differ.

    Attributes:
        views: One tensor per slot, shaped and laid out as the gradient is.
        wire: What is reduced: the flat tensor (as real numbers where it is complex).
    """

    def __init__(self, slots: Sequence[Slot], salt: int = 0) -> None:
        dtype, device = slots[0].dtype, slots[0].device
        step = max(1, _ALIGNMENT // dtype.itemsize)
        offsets = []
        end = 0
        for slot in slots:
            offsets.append(end)
            end += -(-slot.numel // step) * step
        with torch.no_grad():
            # Zeros, so that the gaps between the views add up to zero and never to a signalling NaN.
            self._flat = torch.zeros(end + len(slots) + 1 + salt, dtype=dtype, device=device)
            self._body = self._flat[:end]
            self._used = self._flat[end : end + len(slots)]
            self._weight = self._flat[end + len(slots)]
            self.wire = torch.view_as_real(self._flat) if dtype.is_complex else self._flat
            self.views = [
                self._flat[offset : offset + slot.numel].as_strided(slot.shape, slot.stride, offset)
                for slot, offset in zip(slots, offsets, strict=True)
            ]
        # No loop variable may still name a view when the references are counted.
        list(map(aggregated.add, self.views))
        self._references = self._count_references()

    def idle(self) -> bool:
        """Whether nobody but this pack holds its memory, so that it may be written again."""
        return _COUNTS_ARE_EXACT and self._count_references() == self._references

    def fill(self, gradients: Sequence[torch.Tensor | None], scale: float = 1.0, weight: float = 1.0) -> bool:
        """Write this replica's gradients; missing ones count as zero and are flagged as unused.

        Args:
            gradients: One per slot.
            scale: Multiplies every gradient. 0 writes zeros whatever they hold, NaN included.
            weight: Goes into the weight's place.

        Returns:
            Whether every slot had a gradient.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        if scale == 0.0:
            self._body.zero_()
        elif len(present) == len(self.views):
            torch._foreach_copy_(self.views, present)
        else:
            pairs = list(zip(self.views, gradients, strict=True))
            missing = [view for view, gradient in pairs if gradient is None]
            torch._foreach_zero_(missing)
            if present:
                torch._foreach_copy_([view for view, gradient in pairs if gradient is not None], present)
        if scale not in (0.0, 1.0):
            self._body.mul_(scale)
        if len(present) == len(self.views):
            self._used.fill_(1)
        else:
            flags = [0.0 if gradient is None else 1.0 for gradient in gradients]
            self._used.copy_(torch.tensor(flags, dtype=torch.float32))
        self._weight.fill_(weight)
        return len(present) == len(self.views)

    def used(self) -> list[bool]:
        """After the reduction: which slots had a gradient on some replica. Waits for the device."""
        return [bool(flag) for flag in (self._used != 0).tolist()]

    def divide_by_weight(self) -> None:
        """After the reduction: divide by the weights' sum (by one where every weight is zero)."""
        total = self._weight.real if self._flat.is_complex() else self._weight
        self._body.div_(total.clamp(min=1))

    def divide(self, divisor: float) -> None:
        """After the reduction: divide every gradient."""
        self._body.div_(divisor)

    def _count_references(self) -> tuple[int, int]:
        # Python objects that name a view, autograd and optimizers included (the object of a tensor that C++ holds
        # counts once more); and tensors or arrays that share the memory without being a view of ours.
        names = sum(map(sys.getrefcount, self.views))
        return names, torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)


class PackPool:
    """The packs of one layout: as many as are in use at once, nearly always one or two."""

    def __init__(self, slots: Sequence[Slot], salt: int = 0) -> None:
        self._slots = tuple(slots)
        self._salt = salt
        self._packs: list[Pack] = []

    def take(self) -> Pack:
        """A pack that may be written: an idle one, or a new one when users still hold the others."""
        for pack in self._packs:
            if pack.idle():
                return pack
        pack = Pack(self._slots, self._salt)
        # Two at most are kept: whoever keeps gradients of many steps shall own them alone.
        self._packs = [pack, *self._packs[:1]]
        return pack


def _counts_are_exact() -> bool:
    """Whether a tensor's Python reference count shows that a parameter holds it as `.grad`."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return False
    gradient, parameter = torch.zeros(1), torch.nn.Parameter(torch.zeros(1))
    before = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) == before + 1


# Where torch counts otherwise, every step takes a new pack: slower, never wrong.
_COUNTS_ARE_EXACT = _counts_are_exact()
