"""Messages with tensors in them: each as its raw bytes, in a frame of its own if it is large."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any, Final

import torch

from distnb.objects.memory import bytes_of, dense_tensor
from distnb.objects.packing import out_of_band
from distnb.wire.codec import Frame

__all__ = ["encode_tensors"]


def encode_tensors(message: Any) -> list[Frame]:
    """A message as frames, the header first; those of large tensors are the tensors' own memory.

    `codec.decode` makes tensors and parameters plain tensors on the host, which can be written to.
    """
    frames: list[Frame] = [b""]
    header = io.BytesIO()
    pickler = pickle.Pickler(header, protocol=5, buffer_callback=out_of_band(frames))
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    # Not getbuffer(): as garbage, such a view crashes Python 3.12.1 and earlier 3.12, and others print an error.
    frames[0] = header.getvalue()
    return frames


def open_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of some bytes that nobody else writes to."""
    view = memoryview(data)
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # What came in a frame of its own and is small is copied: it holds the frame, and need not be aligned.
    if view.readonly or (view.nbytes < _SMALL_NBYTES and type(data) is not bytearray):
        data = bytearray(view)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.__reduce_ex__(5)
    host = tensor.detach()
    if not dense_tensor(host) or not host.is_contiguous():
        host = host.resolve_conj().resolve_neg().cpu().contiguous()
    return open_tensor, (pickle.PickleBuffer(bytes_of(host)), host.dtype, tuple(host.shape))


_SMALL_NBYTES: Final = 64 << 10
_REDUCERS: Final = {**copyreg.dispatch_table, torch.Tensor: _reduce, torch.nn.Parameter: _reduce}
