"""Memory that arrays and tensors lie in: it is packed once, and what shows it is packed as a window on it.

So views share memory where they arrive, a tensor shares it with its `numpy()`, and what is large is sent again
only when its bytes have changed.
"""

from __future__ import annotations

import bisect
import sys
import weakref
from typing import Any

__all__ = ["Memories", "Memory", "array_window", "dense_tensor", "tensor_window"]

_SMALL_NBYTES = 1 << 20
_LARGER_BY_FAR = 4
_FEW = 100


class Memory:
    """A block of this process's host memory.

    Args:
        owner: What keeps it alive: an array of bytes, or a torch tensor of bytes.
        start: Its address.
        nbytes: Its size in bytes.

    Attributes:
        digest: Of the bytes as the other side has them; None if it does not.
    """

    __slots__ = ("__weakref__", "digest", "nbytes", "owner", "start")

    def __init__(self, owner: Any, start: int, nbytes: int) -> None:
        self.owner = owner
        self.start = start
        self.nbytes = nbytes
        self.digest: bytes | None = None

    def bytes(self) -> Any:
        """It as an array of bytes."""
        return self.owner.numpy() if hasattr(self.owner, "untyped_storage") else self.owner

    def tensor(self) -> Any:
        """It as a torch tensor of bytes."""
        import torch

        return self.owner if isinstance(self.owner, torch.Tensor) else torch.from_numpy(self.owner)

    def write(self, data: Any) -> None:
        """Give it other content, in place."""
        import numpy

        self.digest = None
        self.bytes()[:] = numpy.frombuffer(data, numpy.uint8)

    @staticmethod
    def filled(data: Any) -> Memory:
        """New memory with the bytes of a buffer that nobody else writes to."""
        import numpy

        view = memoryview(data)
        torch = sys.modules.get("torch")
        if torch is None:
            owner: Any = numpy.frombuffer(bytearray(view) if view.readonly or view.nbytes == 0 else view, numpy.uint8)
            return Memory(owner, owner.ctypes.data, owner.nbytes)
        # torch's own where that costs little: memory of others cannot be resized.
        if view.nbytes > _SMALL_NBYTES and not view.readonly:
            owner = torch.frombuffer(view, dtype=torch.uint8)
        else:
            owner = torch.empty(view.nbytes, dtype=torch.uint8, device="cpu")
            if view.nbytes:
                owner.numpy()[:] = numpy.frombuffer(view, dtype=numpy.uint8)
        return Memory(owner, owner.data_ptr(), view.nbytes)


class Memories:
    """The blocks that are known, in the order of their addresses. Who knows one by its number keeps it."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._starts: list[int] = []

    def add(self, memory: Memory) -> None:
        """Let a block be found."""
        if memory.nbytes:
            if memory.start not in self._known:
                if len(self._starts) > 2 * len(self._known) + _FEW:
                    self._starts = sorted(self._known.keys())
                bisect.insort(self._starts, memory.start)
            self._known[memory.start] = memory

    def of(self, start: int, nbytes: int) -> Memory | None:
        """A known block that holds some bytes."""
        place = bisect.bisect_right(self._starts, start)
        while place:
            place -= 1
            found = self._known.get(self._starts[place])
            if found is not None:
                return found if start + nbytes <= found.start + found.nbytes else None
        return None


def dense_tensor(tensor: Any) -> bool:
    """Whether a tensor is a window on plain memory of the host."""
    import torch

    from distnb.compat.torch_internals import is_functional

    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type == "cpu"
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not is_functional(tensor)
    )


def array_window(array: Any, memories: Memories) -> tuple[Memory, int]:
    """The block that an array lies in, and the offset in bytes of its first element."""
    import numpy
    from numpy.lib.array_utils import byte_bounds

    start, end = byte_bounds(array)
    first = array.__array_interface__["data"][0]
    known = memories.of(start, end - start) if end > start else None
    if known is not None:
        return known, first - known.start
    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(root.base, torch.Tensor) and dense_tensor(root.base):
        memory, _ = tensor_window(root.base, memories)
        return memory, first - memory.start
    flat = root.transpose(numpy.argsort([-abs(stride) for stride in root.strides], kind="stable"))
    if not flat.flags.c_contiguous or root.dtype.itemsize == 0:
        copy = numpy.ascontiguousarray(array)
        memory = Memory(_as_bytes(copy), copy.ctypes.data, copy.nbytes)
        return memory, -1  # nothing can share it: its own copy, in C order
    block, lowest = _as_bytes(flat), flat.__array_interface__["data"][0]
    if root.nbytes > max(_SMALL_NBYTES, _LARGER_BY_FAR * (end - start)):  # not all of it for a small part
        block, lowest = block[start - lowest : end - lowest], start
    memory = Memory(block, lowest, block.nbytes)
    memories.add(memory)
    return memory, first - memory.start


def _as_bytes(array: Any) -> Any:
    import numpy

    return array.reshape(-1).view(numpy.uint8) if array.nbytes else numpy.empty(0, numpy.uint8)


def tensor_window(tensor: Any, memories: Memories) -> tuple[Memory, int]:
    """The block that a dense tensor lies in, and the offset in bytes of its first element."""
    import torch

    first, size = tensor.data_ptr(), tensor.element_size()
    extent = size * (1 + sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape, strict=True)))
    if not tensor.numel():
        return Memory(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0), 0
    known = memories.of(first, extent)
    if known is not None:
        return known, first - known.start
    storage = tensor.untyped_storage()
    start, nbytes = storage.data_ptr(), storage.nbytes()
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    if nbytes > max(_SMALL_NBYTES, _LARGER_BY_FAR * extent):
        whole, start, nbytes = whole[first - start : first - start + extent], first, extent
    memory = Memory(whole, start, nbytes)
    memories.add(memory)
    return memory, first - start
