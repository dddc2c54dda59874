"""The packing of values: pickles for the other side, with numbers in place of the objects that it already has."""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import pickletools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from distnb.compat import pandas_internals
from distnb.objects import constructors
from distnb.objects.code import definitions
from distnb.objects.digesting import INLINE_NBYTES, Digester, Side, on_accelerator
from distnb.objects.memory.blocks import (
    MemoryBlock,
    MemoryBlocks,
    TensorBatch,
    array_window,
    bytes_of,
    dense_tensor,
    is_stored,
    plain_memory,
    stored_window,
    tensor_window,
)
from distnb.objects.memory.mapped_files import file_of, identity_of, open_mapped_file, open_mapped_view, window_of
from distnb.objects.memory.plain_tensors import batches_of, bytes_and_shapes
from distnb.objects.placeholder import Placeholder, cure_for, refusal

__all__ = ["OFFSET_BITS", "Packed", "Packer", "out_of_band"]

OFFSET_BITS = 32
"""The number of low bits of an object's number that hold its place in a part of a pack. The others number the part."""

_KNOWS_PROCESSES = "it stores the processes that existed when it was made"


@dataclass(frozen=True)
class Packed:
    """A pack: values as they are sent, one pickle for each, with a common memo and their buffers.

    Attributes:
        serial: The serial number of the pack, a part of its objects' numbers.
        names: The names of the values, in order.
        data, buffers: The pickles and their buffers; empty in a bare pack.
        starts: The place in the memo at which the part of each name begins, and the end of the last part.
        pairs: A (place in the memo, number) pair for each object that the other side already has, one after the other.
            The high bits of the number are an index into `parts`, so that a number fits in 64 bits.
        parts: The parts of earlier packs to which the numbers belong.
        pickle_digests: The digests of the pickles without the buffers.
        copies: True if the values are copies of objects that stay with the sender. A class among them then changes no
            class of the receiver.
    """

    serial: int
    names: tuple[str, ...]
    data: bytes
    buffers: tuple[Any, ...]
    starts: tuple[int, ...] = ()
    pairs: bytes = b""
    parts: tuple[int, ...] = ()
    pickle_digests: tuple[bytes, ...] = ()
    copies: bool = False

    @property
    def orders(self) -> dict[str, bytes]:
        """A digest of each value's pickle by name. If it is equal on all senders, the objects have the same numbers."""
        return dict(zip(self.names, self.pickle_digests, strict=True))

    def parts_within(self) -> dict[str, set[int]]:
        """Return, for each name, the parts of earlier packs that brought the known objects in its value."""
        import numpy

        rows = numpy.frombuffer(self.pairs, numpy.int64).reshape(-1, 2)
        names = numpy.searchsorted(self.starts, rows[:, 0], side="right") - 1
        found: dict[str, set[int]] = {}
        for name, part in numpy.unique(numpy.stack((names, rows[:, 1] >> OFFSET_BITS), axis=1), axis=0).tolist():
            found.setdefault(self.names[name], set()).add(self.parts[part])
        return found

    def bare(self) -> Packed:
        """Return the pack without its content, for a receiver that gets the content from another sender."""
        return Packed(
            serial=self.serial,
            names=self.names,
            data=b"",
            buffers=(),
            starts=self.starts,
            pickle_digests=self.pickle_digests,
        )

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return len(self.data) + sum(memoryview(each).nbytes for each in self.buffers)

    def __reduce__(self) -> Any:
        buffers = tuple(pickle.PickleBuffer(each) for each in self.buffers)
        data = pickle.PickleBuffer(self.data)
        numbers = self.starts, self.pairs, self.parts
        return Packed, (self.serial, self.names, data, buffers, *numbers, self.pickle_digests, self.copies)


def out_of_band(buffers: list[Any]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a callback that keeps large buffers out of the pickle and appends them to a list."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < INLINE_NBYTES:
            return True
        buffers.append(raw)
        return False

    return keep


class Packer(Digester):
    """A pickler of values that are sent.

    Args:
        known: Returns the number of an object that the other side has with the same content, or None.
        number_of: Returns the number of an object that the other side has, perhaps with other content, or None. No
            function: the other side keeps no numbers.
        memories: The known blocks of memory.

    Attributes:
        referred: The objects that were sent by reference.
        parts_used: The parts of earlier packs to whose objects this pack refers by number.
        batches: The batches of tensors, each with the name of the value in which they are.
    """

    def __init__(
        self,
        side: Side,
        known: Callable[[Any], int | None] | None,
        number_of: Callable[[Any], int | None] | None,
        memories: MemoryBlocks,
    ) -> None:
        self.buffers: list[Any] = []
        self.referred: list[Any] = []
        self.parts_used: set[int] = set()
        self.batches: list[tuple[str, TensorBatch]] = []
        self._batched: dict[int, tuple[TensorBatch, int]] = {}
        self._number_of = number_of
        self._memories = memories
        if known is not None:
            self.persistent_id = known  # called for every object, so it is set only if it can find any
        self.file = io.BytesIO()
        super().__init__(side, file=self.file, keep=out_of_band(self.buffers))

    def place_of(self, obj: Any) -> int:
        """Return the place in the memo of a packed object, from a second pickle, which only refers to the place."""
        end = self.file.tell()
        self.dump(obj)
        self.file.seek(end)
        place: Any = next(arg for opcode, arg, _ in pickletools.genops(self.file) if opcode.name.endswith("BINGET"))
        self.file.seek(end)
        self.file.truncate()
        return int(place)

    def reference(self, obj: Any) -> Any:
        token = self.side.references.token(obj)
        if token is None:
            return None
        self.referred.append(obj)
        return constructors.open_reference, (token,)

    def array(self, array: Any) -> Any:
        if array.dtype.hasobject:
            return NotImplemented
        if array.base is not None and (mapped := file_of(array)) is not None:
            file, root = mapped
            if array is root:
                return open_mapped_file, (file, identity_of(file.path))
            return open_mapped_view, (root, window_of(array), type(array), bool(array.flags.writeable))
        memory, offset = array_window(array, self._memories)
        strides = array.strides if offset >= 0 else None
        shown = (memory, array.dtype, array.shape, strides, max(offset, 0), bool(array.flags.writeable))
        return constructors.open_array, shown

    def send_together(self, name: str, tensors: Sequence[Any]) -> None:
        """Send plain tensors, which are in the value that is pickled next, in batches as far as possible.

        Args:
            name: The name of the value.
            tensors: Tensors that the other side does not have.
        """
        for batch in batches_of(tensors, self._memories):
            self.batches.append((name, batch))
            self._batched |= {id(tensor): (batch, place) for place, tensor in enumerate(batch)}
            self._memories.add_later(batch)

    def place(self, tensor: Any) -> Any:
        batched = self._batched.get(id(tensor))
        if batched is not None:
            return operator.getitem, batched
        reference = self.reference(tensor)
        return reference if reference is not None else self.tensor(tensor)

    def tensor(self, tensor: Any) -> Any:
        plain = plain_memory(tensor)
        if plain is not None:
            memory, offset = stored_window(tensor, *plain, self._memories)
            first, misplaced = divmod(offset, tensor.element_size())
            if not misplaced:
                window = (memory, tensor.dtype, (*tensor.shape,), tensor.stride(), first)
                return constructors.open_tensor, (*window, type(tensor))
        if tensor.grad_fn is not None or (tensor.requires_grad and not tensor.is_leaf):
            if not self.side.copying:
                return self.graph(tensor)
            tensor = tensor.detach()
        if not tensor.is_cpu and on_accelerator(tensor) and tensor.layout is sys.modules["torch"].strided:
            # Copy the tensor to the host, because not all accelerators allow access to their memory as bytes. Views of
            # one storage become separate tensors.
            host, is_parameter = tensor.detach().cpu().contiguous(), type(tensor).__name__ == "Parameter"
            shown = pickle.PickleBuffer(bytes_of(host))
            made: Any = constructors.open_from_host, (shown, host.dtype, tuple(host.shape), is_parameter)
        elif not dense_tensor(tensor):
            return self.special_tensor(tensor)
        elif not is_stored(tensor) and tensor.untyped_storage().nbytes():
            return self.unstored_tensor(tensor)
        else:
            memory, offset = tensor_window(tensor, self._memories)
            size = tensor.element_size()
            if offset % size:
                memory, offset = tensor_window(tensor.detach().clone(), MemoryBlocks())
            window = (memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset // size)
            made = constructors.open_tensor, (*window, type(tensor))
        state = (tensor.requires_grad, tensor.grad if tensor.is_leaf else None, tensor.__dict__ or None)
        return made if state == (False, None, None) else (*made, state, None, None, constructors.fill_tensor)

    def a_class(self, cls: type) -> Any:
        return definitions.reduce_class(cls, self.side.classes)

    def table(self, table: Any) -> Any:
        reference = self.reference(table)
        if reference is not None:
            return reference
        state = pandas_internals.state_apart(table)
        return self.other(table) if state is None else (copyreg.__newobj__, (type(table),), state)  # type: ignore[attr-defined]

    def graph(self, tensor: Any) -> Any:
        """Reduce a tensor that has a graph of operations, which stays in its process."""
        reference = self.reference(tensor)
        if reference is not None:
            return reference
        cure = "pass on tensor.detach(), or compute it inside the distributed cell"
        why = "it has a graph of operations, which stays in its process"
        return Placeholder, (refusal(self.label, self.root, tensor, cure, why),)

    def world_bound(self, obj: Any) -> Any:
        if self.side.copying:
            return self.instance(obj)  # the user wants to inspect the copy
        reference = self.reference(obj)
        if reference is not None:
            return reference
        return Placeholder, (refusal(self.label, self.root, obj, cure_for(obj), _KNOWS_PROCESSES),)

    def storage(self, storage: Any) -> Any:
        import torch

        from distnb.compat.torch_internals import untyped_storage

        plain = untyped_storage(storage)
        whole = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(plain)
        dtype = storage.dtype if plain is not storage else None
        if on_accelerator(whole):
            shown = pickle.PickleBuffer(bytes_of(whole.cpu()))
            return constructors.open_storage_from_host, (shown, dtype)
        memory = self._memories.of_storage(plain)
        if memory is None:
            memory = MemoryBlock.of_storage(plain)
            self._memories.add(memory)
        return constructors.open_storage, (memory, dtype)

    def batch(self, batch: TensorBatch) -> Any:
        """Reduce a batch of tensors to one buffer."""
        data, shapes = bytes_and_shapes(batch)
        return constructors.open_batch, (pickle.PickleBuffer(data), batch[0].dtype, shapes)

    def memory(self, memory: MemoryBlock) -> Any:
        """Reduce a block of memory to its bytes, unless the other side has them."""
        data, resizable = memory.buffer(), memory.is_resizable
        shown = pickle.PickleBuffer(data) if memory.nbytes else b""
        if self._number_of is None:
            return constructors.open_memory, (shown, resizable)
        number = self._number_of(memory)
        tensor = memory.of_tensor() if memory.of_tensor is not None and number is None else None
        if tensor is not None and id(tensor) in self._batched:
            return constructors.memory_of, (tensor,)
        digest, _ = self.seen.large.get((memory.start, memory.nbytes), (b"", None))
        if not digest and memory.nbytes:
            digest = xxhash.xxh3_128_digest(data)
        known, memory.digest = memory.digest, digest
        if number is None:
            return constructors.open_memory, (shown, resizable)
        return constructors.update_memory, (number, None if known == digest else shown, resizable)
