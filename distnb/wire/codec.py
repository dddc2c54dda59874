"""Objects and messages as frames of bytes: one small header, then raw buffers that are never copied twice.

Two levels, each with its own pickler. An *envelope* is a message of `wire.messages`; plain pickle is enough for
it. What users made (arguments, results, namespaces) is packed into a `Parcel` by cloudpickle, and a parcel's
frames ride in the envelope as they are.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from distnb.errors import MessageError

__all__ = ["Parcel", "Pickler", "Unpickler", "decode", "encode", "pack", "place_storage", "unpack"]

Frame = bytes | bytearray | memoryview

_INLINE_NBYTES = 1024  # below this a frame of its own costs more than it saves


def _out_of_band(frames: list[Frame]) -> Callable[[pickle.PickleBuffer], bool]:
    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _INLINE_NBYTES:
            return True
        frames.append(raw)
        return False

    return keep


def encode(message: Any) -> list[Frame]:
    """A message as frames, the header first."""
    frames: list[Frame] = [b""]
    frames[0] = pickle.dumps(message, protocol=5, buffer_callback=_out_of_band(frames))
    return frames


def decode(frames: Sequence[Frame]) -> Any:
    """The message that `encode` was given. To be called on authenticated bytes only: pickles run code.

    Raises:
        MessageError: The frames are no message.
    """
    try:
        return pickle.loads(frames[0], buffers=frames[1:])
    except Exception as error:
        raise MessageError(
            f"{len(frames)} frames arrived that are no message of distnb ({type(error).__name__}: {error}). "
            "Do notebook and engines run the same version?"
        ) from error


class Parcel:
    """Packed user objects: opaque frames that travel inside a message without being copied."""

    __slots__ = ("frames",)

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = list(frames)

    @property
    def nbytes(self) -> int:
        """Size of all frames in bytes."""
        return sum(memoryview(frame).nbytes for frame in self.frames)

    def inline(self) -> bytes | None:
        """All of it in one piece, if it is small."""
        frame, *others = self.frames
        return bytes(frame) if not others and len(frame) < _INLINE_NBYTES else None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Parcel, ([pickle.PickleBuffer(frame) for frame in self.frames],)


# -- tensors: their storages are the raw buffers ------------------------------------------------------------------


_SHOWN_AS_BYTES = ("cpu", "cuda", "meta")


def on_the_cpu(device: str) -> str:
    """The notebook's rule."""
    return "cpu"


place_storage: Callable[[str], str] = on_the_cpu
"""Where a storage that lived on `device` is rebuilt. The notebook needs no GPU; an engine sets its own rule."""


def _rebuild_storage(data: Any, device: str) -> Any:
    import torch

    storage = torch.UntypedStorage(0) if len(data) == 0 else torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    target = place_storage(device)
    return (
        storage
        if target == "cpu"
        else torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).to(target).untyped_storage()
    )


def _rebuild_from_host(host: Any, device: str, requires_grad: bool, is_parameter: bool) -> Any:
    import torch

    target = place_storage(device)
    tensor = host if target == "cpu" else host.to(target)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _rebuild_typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle whose large buffers, those of tensors on any device too, stay out of band.

    Subclasses add persistent ids and reducers of their own; they call `reduce_tensor_data` first.

    Attributes:
        buffers: The frames that were kept out of band, in order.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[Frame] = []
        # Storages are wrapped anew at each access; one wrapper a storage lets the memo see that views share it.
        self._storages: dict[int, Any] = {}
        super().__init__(file, protocol=5, buffer_callback=_out_of_band(self.buffers))

    def reduce_tensor_data(self, obj: Any) -> Any:
        """How to pickle `obj` if it is a tensor's storage, or a tensor whose storage cannot be had; else
        NotImplemented."""
        reduced = self.reduce_from_device(obj)
        return self._reduce_storage(obj) if reduced is NotImplemented else reduced

    def _reduce_storage(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return NotImplemented
        if isinstance(obj, torch.UntypedStorage):
            data = obj.cpu() if obj.device.type != "cpu" else obj
            flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(data)
            return _rebuild_storage, (pickle.PickleBuffer(flat.numpy()), str(obj.device))
        untyped = obj._untyped_storage
        return _rebuild_typed_storage, (self._storages.setdefault(untyped._cdata, untyped), obj.dtype)

    def reduce_from_device(self, obj: Any) -> Any:
        """How to pickle `obj` if it is a tensor of a device whose memory torch may not show as bytes, else
        NotImplemented: as a copy on the host. Views of one memory become tensors of their own."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.Tensor) or obj.device.type in _SHOWN_AS_BYTES:
            return NotImplemented
        if type(obj).__reduce_ex__ not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
            return NotImplemented  # it says itself what it is made of: a plain tensor, and more (our variables)
        is_parameter = isinstance(obj, torch.nn.Parameter)
        requires_grad = obj.is_leaf and obj.requires_grad
        return _rebuild_from_host, (obj.detach().to("cpu"), str(obj.device), requires_grad, is_parameter)

    def reducer_override(self, obj: Any) -> Any:
        reduced = self.reduce_tensor_data(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class Unpickler(pickle.Unpickler):
    """Reads what `Pickler` wrote; subclasses resolve persistent ids."""


def pack(value: Any, make: Callable[[io.BytesIO], Pickler] = Pickler) -> Parcel:
    """Pack one object (and all that it refers to) with the pickler that `make` gives."""
    file = io.BytesIO()
    pickler = make(file)
    pickler.dump(value)
    return Parcel([file.getbuffer(), *pickler.buffers])


def unpack(parcel: Parcel, make: Callable[..., pickle.Unpickler] = Unpickler) -> Any:
    """The object that `pack` was given, read by the unpickler that `make(file, buffers=…)` gives."""
    file = io.BytesIO(bytes(parcel.frames[0]))
    return make(file, buffers=parcel.frames[1:]).load()
