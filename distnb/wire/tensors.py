"""Messages with tensors in them: each as its raw bytes, in a frame of its own if it is large."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any, Final

import torch

from distnb.objects.memory.tensor_bytes import reduce_tensor
from distnb.objects.packing import out_of_band
from distnb.wire.codec import Frame

__all__ = ["encode_tensors"]


def encode_tensors(message: Any) -> list[Frame]:
    """Return a message as frames, the header first; those of large tensors are the tensors' own memory.

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


_REDUCERS: Final = {**copyreg.dispatch_table, torch.Tensor: reduce_tensor, torch.nn.Parameter: reduce_tensor}
