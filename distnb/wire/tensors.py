"""Messages with tensors in them: each as its raw bytes, in a frame of its own if it is large."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import torch

from distnb.objects.looking import bytes_of
from distnb.objects.memory import Memory
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
    frames[0] = header.getbuffer()
    return frames


def open_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of some bytes that nobody else writes to."""
    opened: torch.Tensor = Memory.filled(data).tensor().view(dtype).view(shape)
    return opened


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.__reduce_ex__(5)
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return open_tensor, (pickle.PickleBuffer(bytes_of(host)), host.dtype, tuple(host.shape))


_REDUCERS = {**copyreg.dispatch_table, torch.Tensor: _reduce, torch.nn.Parameter: _reduce}
