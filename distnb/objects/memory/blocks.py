"""The memory of arrays and tensors. A block is packed once, and each array or tensor on it is packed as a window.

Views therefore share memory where they arrive, as do a tensor and its `numpy()`, and a large block is sent again only
when its bytes have changed. Closures and messages with servers share no memory between tensors, and pack each tensor
alone, without these tables (`distnb.objects.memory.tensor_bytes`).
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "BYTES_AT",
    "COPIED_NBYTES",
    "PLAIN_DTYPES",
    "MemoryBlock",
    "MemoryBlocks",
    "TensorBatch",
    "array_window",
    "buffer_at",
    "bytes_of",
    "dense_tensor",
    "is_stored",
    "plain_memory",
    "stored_window",
    "tensor_window",
]

COPIED_NBYTES = 1 << 20
"""The largest block that is copied on arrival, which takes no longer than to map it."""

_LARGER_BY_FAR = 4
_FEW = 100
_MOST_SIZES = 1000


class MemoryBlock:
    """A block of this process's host memory.

    Args:
        owner: The object that keeps the memory alive: an array of bytes, or a torch tensor of bytes; None for the
            storage, as a tensor that is made when it is needed.
        start: The address.
        nbytes: The size in bytes.
        storage: The storage of torch that the block covers completely; None if there is none.

    Attributes:
        digest: The digest of the bytes that the other side has; None if it has none.
        of_tensor: A weak reference to the tensor whose number stands for the block, which has none; None for others.
    """

    __slots__ = ("__weakref__", "_owner", "digest", "nbytes", "of_tensor", "start", "storage")

    def __init__(self, owner: Any, start: int, nbytes: int, storage: Any = None) -> None:
        self._owner = owner
        self.start = start
        self.nbytes = nbytes
        self.storage = storage
        self.digest: bytes | None = None
        self.of_tensor: weakref.ref[Any] | None = None

    @staticmethod
    def of_storage(storage: Any) -> MemoryBlock:
        """Return the block of a whole storage."""
        return MemoryBlock(None, storage.data_ptr(), storage.nbytes(), storage)

    @property
    def owner(self) -> Any:
        """The object that keeps the memory alive: an array of bytes, or a torch tensor of bytes."""
        if self._owner is None:
            self._owner = _bytes_on(self.storage)
        return self._owner

    @property
    def is_resizable(self) -> bool:
        """True if the block is a storage that torch can resize."""
        return self.storage is not None and bool(self.storage.resizable())

    def is_there(self, start: int) -> bool:
        """Return whether the block still begins at an address. It does not if torch has resized the storage."""
        self.follow()
        if self.storage is None and _is_tensor(self.owner):
            return bool(self.owner.data_ptr() == start) and is_stored(self.owner)
        return self.start == start

    def follow(self) -> None:
        """Update address and size if torch has resized the storage."""
        storage = self.storage
        if storage is not None and (storage.nbytes() != self.nbytes or storage.data_ptr() != self.start):
            self._owner, self.start, self.nbytes = None, storage.data_ptr(), storage.nbytes()

    def buffer(self) -> Any:
        """Return the bytes, as `buffer_at` does."""
        return buffer_at(self.start, self.nbytes, self.storage if self._owner is None else self._owner)

    def array(self) -> Any:
        """View the block as an array of bytes. torch does not resize a storage that an array shares."""
        return self.owner.numpy() if _is_tensor(self.owner) else self.owner

    def tensor(self) -> Any:
        """View the block as a torch tensor of bytes."""
        import torch

        return self.owner if _is_tensor(self.owner) else torch.from_numpy(self.owner)

    def write(self, data: Any) -> bool:
        """Replace the content in place. Return False if its size differs and the storage cannot be resized."""
        import numpy

        view = memoryview(data).cast("B")
        if view.nbytes != self.nbytes:
            if not self.is_resizable:
                return False
            self.storage.resize_(view.nbytes)
            self.follow()
        self.digest = None
        if _is_tensor(self.owner):
            memoryview(self.buffer()).cast("B")[:] = view
        else:
            self.owner[:] = numpy.frombuffer(view, numpy.uint8)
        return True

    @staticmethod
    def filled(data: Any, copied_nbytes: int = COPIED_NBYTES) -> MemoryBlock:
        """Make a block with the bytes of a buffer that nobody else writes to.

        A larger block than `copied_nbytes` uses the buffer's own memory, which the processes of a machine share until
        they write to it, and which torch cannot resize.
        """
        import numpy

        view = memoryview(data)
        torch = sys.modules.get("torch")
        if torch is None:
            owner: Any = numpy.frombuffer(bytearray(view) if view.readonly or view.nbytes == 0 else view, numpy.uint8)
            return MemoryBlock(owner, owner.ctypes.data, owner.nbytes)
        if view.nbytes > copied_nbytes and not view.readonly:
            owner = torch.frombuffer(view, dtype=torch.uint8)
        else:
            owner = torch.empty(view.nbytes, dtype=torch.uint8, device="cpu")
            BYTES_AT[view.nbytes](owner.data_ptr()).raw = view
        return MemoryBlock(owner, owner.data_ptr(), view.nbytes, owner.untyped_storage())


def _is_tensor(owner: Any) -> bool:
    return hasattr(owner, "untyped_storage")


def _bytes_on(storage: Any) -> Any:
    import torch

    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


@functools.cache
def _identity_of_storage() -> Callable[[Any], int]:
    from distnb.compat.torch_internals import identity_of_storage

    return identity_of_storage


def _identity(storage: Any) -> int:
    return _identity_of_storage()(storage)


class _BytesAt(dict[int, Callable[[int], Any]]):
    """Functions that return the object for so many bytes at an address. ctypes takes a microsecond to make one."""

    def __missing__(self, nbytes: int) -> Callable[[int], Any]:
        found = (ctypes.c_char * nbytes).from_address
        if len(self) < _MOST_SIZES:
            self[nbytes] = found
        return found


BYTES_AT = _BytesAt()


def buffer_at(address: int, nbytes: int, owner: Any) -> Any:
    """Return an object with the buffer interface for the bytes at an address. It keeps their owner alive.

    The owner's own methods would have side effects: torch never again resizes a storage that NumPy has seen, and the
    receiver copies a read-only buffer. A memoryview will not do, because Python's garbage collector crashes on a
    memoryview of another one that is garbage.
    """
    mapped: Any = BYTES_AT[nbytes](address)
    mapped.owner = owner
    return mapped


def bytes_of(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor on the host, as `buffer_at` does."""
    return buffer_at(tensor.data_ptr(), tensor.nbytes, tensor)


class TensorBatch(list[Any]):
    """Small tensors with memory of their own that are sent together, in one buffer.

    Attributes:
        identities: The identities of the tensors' storages, where the tensors come from.
        blocks: The blocks of their memory, once they are needed.
    """

    __slots__ = ("__weakref__", "blocks", "identities")

    def __init__(self, tensors: Iterable[Any], identities: Iterable[int] = ()) -> None:
        super().__init__(tensors)
        self.identities = frozenset(identities)
        self.blocks: list[MemoryBlock] = []


class MemoryBlocks:
    """The known blocks by address, without strong references: the table of a pack keeps its blocks alive."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, MemoryBlock] = weakref.WeakValueDictionary()
        self._starts: list[int] = []
        # When torch resizes a storage, its identity stays the same, but its address changes.
        self._storages: weakref.WeakValueDictionary[int, MemoryBlock] = weakref.WeakValueDictionary()
        self._waiting: list[weakref.ref[Any]] = []

    def add_later(self, batch: TensorBatch) -> None:
        """Add the memory of a batch's tensors when a block is next looked up: often, none ever is."""
        self._waiting = [reference for reference in self._waiting if reference() is not None]
        self._waiting.append(weakref.ref(batch))

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for reference in waiting:
            batch: TensorBatch = reference() or TensorBatch(())
            for tensor in batch:
                if self._storages.get(_identity(tensor.untyped_storage())) is None:
                    memory = MemoryBlock.of_storage(tensor.untyped_storage())
                    memory.of_tensor = weakref.ref(tensor)
                    batch.blocks.append(memory)
                    self.add(memory)

    def are_known(self, identities: Sequence[int]) -> set[int]:
        """Return those identities of storages whose memory is known, or waits to be added."""
        found = {identity for identity in identities if identity in self._storages} if self._storages else set()
        for batch in filter(None, (reference() for reference in self._waiting)):
            found.update(batch.identities.intersection(identities))
        return found

    def add(self, memory: MemoryBlock) -> None:
        """Add a block."""
        if memory.storage is not None:
            self._storages[_identity(memory.storage)] = memory
        if memory.nbytes:
            if memory.start not in self._known:
                if len(self._starts) > 2 * len(self._known) + _FEW:
                    self._starts = sorted(self._known.keys())
                bisect.insort(self._starts, memory.start)
            self._known[memory.start] = memory

    def of(self, start: int, nbytes: int) -> MemoryBlock | None:
        """Return a known block that contains these bytes, or None."""
        if self._waiting:
            self._add_waiting()
        place = bisect.bisect_right(self._starts, start)
        while place:
            place -= 1
            found = self._known.get(self._starts[place])
            if found is None:
                continue
            if not found.is_there(self._starts[place]):
                del self._known[self._starts[place]]  # the address may belong to another object now
                continue
            return found if start + nbytes <= found.start + found.nbytes else None
        return None

    def of_storage(self, storage: Any) -> MemoryBlock | None:
        """Return the known block that covers a whole storage, or None."""
        if self._waiting:
            self._add_waiting()
        found = self._storages.get(_identity(storage))
        if found is not None:
            found.follow()
        return found


def dense_tensor(tensor: Any) -> bool:
    """Return whether a tensor is a window on plain memory of the host."""
    import torch

    from distnb.compat.torch_internals import has_no_memory

    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not has_no_memory(tensor)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # not a fake or distributed tensor
    )


class _PlainDtypes(dict[Any, str | None]):
    """Short names of torch's dtypes, filled on demand; None for dtypes whose tensors may have no plain memory."""

    def __missing__(self, dtype: Any) -> str | None:
        name = str(dtype).removeprefix("torch.")
        found = self[dtype] = None if dtype.is_complex or name.startswith(("q", "Q")) else name
        return found


PLAIN_DTYPES = _PlainDtypes()


def plain_memory(tensor: Any) -> tuple[int, int] | None:
    """Return the address and the size in bytes of a plain tensor, or None for a tensor that needs a closer look.

    A plain tensor is contiguous in the host's memory, requires no gradients, and has no attributes. This is a shortcut,
    because data sets have thousands of them.
    """
    if PLAIN_DTYPES[tensor.dtype] is None or not tensor.is_cpu or tensor.requires_grad or tensor.is_nested:
        return None
    try:
        address, nbytes = tensor.data_ptr(), tensor.nbytes
    except (RuntimeError, NotImplementedError):  # it has no memory of its own
        return None
    if not address or tensor.is_neg() or not tensor.is_contiguous() or tensor.grad is not None or tensor.__dict__:
        return None
    begin = tensor.storage_offset() and tensor.storage_offset() * tensor.element_size()
    return (address, nbytes) if begin + nbytes <= tensor.untyped_storage().nbytes() else None


def is_stored(tensor: Any) -> bool:
    """Return whether the storage of a dense tensor is large enough for the tensor.

    It is too small after `storage.resize_(0)`, which frees sharded parameters that are not in use, and if torch refused
    to resize the storage after it had changed the tensor's shape.
    """
    extent = _extent(tensor)
    end = tensor.storage_offset() * tensor.element_size() + extent
    return not extent or bool(end <= tensor.untyped_storage().nbytes())


def _extent(tensor: Any) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last one."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    if not tensor.numel():
        return 0
    steps = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape, strict=True))
    return int(tensor.element_size() * (1 + steps))


def array_window(array: Any, memories: MemoryBlocks) -> tuple[MemoryBlock, int]:
    """Return the block that contains an array, and the offset in bytes of the array's first element.

    The offset is -1 for an array that cannot share memory. Its block is then a copy in C order.
    """
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
        memory = MemoryBlock(_as_bytes(copy), copy.ctypes.data, copy.nbytes)
        return memory, -1
    block, lowest = _as_bytes(flat), flat.__array_interface__["data"][0]
    if root.nbytes > max(COPIED_NBYTES, _LARGER_BY_FAR * (end - start)):  # do not send all of it for a small part
        block, lowest = block[start - lowest : end - lowest], start
    memory = MemoryBlock(block, lowest, block.nbytes)
    memories.add(memory)
    return memory, first - memory.start


def _as_bytes(array: Any) -> Any:
    import numpy

    return array.reshape(-1).view(numpy.uint8) if array.nbytes else numpy.empty(0, numpy.uint8)


def tensor_window(tensor: Any, memories: MemoryBlocks) -> tuple[MemoryBlock, int]:
    """Return the block that contains a dense tensor, and the offset in bytes of the tensor's first element.

    The block is empty if the tensor has no elements, or if its storage is empty.
    """
    import torch

    first, extent = tensor.data_ptr(), _extent(tensor)
    if not extent:
        return MemoryBlock(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0), 0
    return stored_window(tensor, first, extent, memories)


def stored_window(tensor: Any, first: int, extent: int, memories: MemoryBlocks) -> tuple[MemoryBlock, int]:
    """Return the same for a tensor whose address, and whose size from the first element to the last, is known."""
    storage = tensor.untyped_storage()
    known = memories.of_storage(storage)
    if known is not None:
        return known, tensor.storage_offset() * tensor.element_size()
    known = memories.of(first, extent)
    if known is not None:
        return known, first - known.start
    memory = MemoryBlock.of_storage(storage)
    if memory.nbytes > max(COPIED_NBYTES, _LARGER_BY_FAR * extent):
        begin = first - memory.start
        memory = MemoryBlock(memory.owner[begin : begin + extent], first, extent)
    memories.add(memory)
    return memory, first - memory.start
