"""Pieces of the common memory, each of which holds one variable, and what a replica sees of them."""

from __future__ import annotations

import hashlib
import weakref
from typing import NamedTuple

import torch

from distnb.collectives.shared_memory.segment import SharedMemory

__all__ = ["Layout", "Region", "bytes_of", "digest", "layout_of", "memory_of", "on_host"]


class Region:
    """The memory of one tensor, or of several that lie in the same memory.

    Attributes:
        number: Which one it is: the same on every replica, and never used again.
        owner: The replica that writes to it.
        common: What all see, as a storage; `own`: what this replica sees, if its tensors lie here.
        copy: The tensor on this replica's accelerator that is a copy of it; None where tensors lie here.
    """

    def __init__(self, number: int, owner: int, arena: SharedMemory, begin: int, nbytes: int) -> None:
        self.number, self.owner = number, owner
        self.arena, self.begin, self.nbytes = arena, begin, nbytes
        self.own = arena.own(begin, nbytes).untyped_storage()
        self.common = arena.common(begin, nbytes).untyped_storage()
        self.copy: weakref.ref[torch.Tensor] | None = None

    @property
    def pages(self) -> range:
        """Those of its arena on which it lies."""
        return self.arena.pages(self.begin, self.nbytes)

    def seen(self) -> torch.Tensor:
        """Its bytes, as this replica sees them."""
        copied = self.copy() if self.copy is not None else None
        return memory_of(self.own) if copied is None else bytes_of(copied)

    def copy_differs(self) -> bool:
        """Whether this replica's accelerator has another value than the common one. To the last bit, NaNs included."""
        # No counter tells of every write: `p.data.mul_(2)` leaves the version of p as it is.
        return self.copy is not None and not torch.equal(self.seen(), memory_of(self.common))

    def write(self, tensor: torch.Tensor) -> None:
        """Make a tensor's memory the common one."""
        memory_of(self.common).copy_(memory_of(tensor.untyped_storage()) if on_host(tensor) else bytes_of(tensor))


class Layout(NamedTuple):
    """How a tensor lies in memory of the host that holds what its own memory holds."""

    address: int
    nbytes: int
    stride: tuple[int, ...]
    offset: int


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a tensor lies, or would lie on the host if it is on an accelerator."""
    if not on_host(tensor):  # what it is a copy of has its elements one after the other
        stride = torch.empty(tensor.shape, device="meta").stride()
        return Layout(0, tensor.numel() * tensor.element_size(), tuple(stride), 0)
    storage = tensor.untyped_storage()
    return Layout(storage.data_ptr(), storage.nbytes(), tuple(tensor.stride()), int(tensor.storage_offset()))


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory of the host, so that it can lie in the common memory."""
    return tensor.device.type == "cpu"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor, one after the other, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def memory_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage on the host."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def digest(tensor: torch.Tensor) -> bytes:
    """Of the elements of a tensor."""
    return hashlib.blake2b(bytes_of(tensor).numpy().data, digest_size=16).digest()
