"""The pickled form of a single tensor: its bytes on the host, as a buffer of their own.

Closures and the messages of parameter servers use it. Cells send tensors as windows on their storage instead
(`distnb.objects.memory.blocks`), because views of one storage must share memory where they arrive.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import torch

from distnb.objects.memory.blocks import bytes_of, dense_tensor

__all__ = ["open_tensor", "reduce_tensor"]

_SMALL_NBYTES: Final = 64 << 10


def reduce_tensor(tensor: torch.Tensor, *, trainable: bool = False) -> Any:
    """Reduce a tensor to its bytes, without a graph. With `trainable` a leaf that requires gradients still does so."""
    host = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return host.cpu().__reduce_ex__(5)  # its parts are tensors, which are reduced in turn
    if not dense_tensor(host) or not host.is_contiguous():
        host = host.resolve_conj().resolve_neg().cpu().contiguous()
    content = pickle.PickleBuffer(bytes_of(host)), host.dtype, tuple(host.shape)
    return open_tensor, (*content, True) if trainable and tensor.requires_grad and tensor.is_leaf else content


def open_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool = False) -> torch.Tensor:
    """Make a tensor from bytes that no other object writes to. It is on the host, and can be written to."""
    view = memoryview(data)
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu", requires_grad=requires_grad)
    # A small part of a frame is copied: it would keep the whole frame alive, and need not be aligned.
    if view.readonly or (view.nbytes < _SMALL_NBYTES and type(data) is not bytearray):
        data = bytearray(view)
    return torch.frombuffer(data, dtype=dtype).view(shape).requires_grad_(requires_grad)
