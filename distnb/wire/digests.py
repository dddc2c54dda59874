"""Digests of arrays and tensors: the same bytes give the same digest on every replica and in the notebook."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import xxhash

__all__ = ["DIGEST_NBYTES", "digest_of_buffers", "digest_of_content", "is_array", "is_tensor", "mark_of_content"]


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array whose elements are bytes (no object array, no matrix subclass)."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) in (numpy.ndarray, numpy.memmap) and not value.dtype.hasobject


def is_tensor(value: Any) -> bool:
    """Whether a value is a dense torch tensor, parameters included."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    usual = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return (
        type(value) in usual
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
    )


def digest_of_content(value: Any) -> bytes:
    """The digest of an array or a tensor: of its dtype, shape and elements, and of a tensor's gradient."""
    hasher = xxhash.xxh3_128()
    if is_array(value):
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        hasher.update(_bytes_of_array(value))
    else:
        # Not the device: a tensor may be on cuda:0 here and on cuda:1 there, and still be the same.
        hasher.update(f"{value.dtype}{tuple(value.shape)}{value.requires_grad}{type(value).__name__}".encode())
        hasher.update(_bytes_of_tensor(value))
        gradient = value.grad if value.is_leaf else None
        if gradient is not None and gradient.layout == value.layout:
            hasher.update(_bytes_of_tensor(gradient))
    return hasher.digest()


DIGEST_NBYTES = 16
_marks = itertools.count()


def mark_of_content(value: Any) -> bytes:
    """The digest of an array or a tensor, to be compared with an earlier one of the same object.

    Attributes that were given to a tensor are not looked into: with them it is never what it was.
    """
    digest = digest_of_content(value)
    return digest + b"%d" % next(_marks) if getattr(value, "__dict__", None) else digest


def digest_of_buffers(buffers: Any) -> bytes:
    """The digest of a sequence of buffers and of where one ends and the next begins."""
    hasher = xxhash.xxh3_128()
    for buffer in buffers:
        view = memoryview(buffer)
        hasher.update(view.nbytes.to_bytes(8, "little"))
        hasher.update(view)
    return hasher.digest()


def _bytes_of_array(array: Any) -> Any:
    import numpy

    if array.size == 0:
        return b""
    # dtypes such as datetime64 have no buffer of their own: look at the bytes.
    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8).data


def _bytes_of_tensor(tensor: Any) -> Any:
    import torch

    plain = tensor.detach()
    if plain.numel() == 0:
        return b""
    plain = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data
