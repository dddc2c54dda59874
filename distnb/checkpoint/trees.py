"""A tree of plain values and tensors, as JSON text and named tensors. Reading it executes nothing."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from distnb.checkpoint.stored_tensors import StoredTensor, whole
from distnb.checkpoint.tensor_files import DTYPES
from distnb.checkpoint.tensor_slices import TensorSlice
from distnb.errors import CheckpointError, OptionError

__all__ = ["decode", "encode"]

_KIND = "$"
"""The key of a JSON object that represents a value of a type that JSON lacks."""


def encode(tree: Any) -> tuple[Any, dict[str, torch.Tensor | TensorSlice]]:
    """Split a tree into JSON values and tensors. Each tensor is named by its path in the tree.

    Args:
        tree: Dicts, lists and tuples of None, bool, int, float, str, bytes, dtypes, NumPy arrays, tensors and slices of
            tensors. A tensor that appears several times is named once.

    Raises:
        OptionError: The tree contains something else. The error names the path.
    """
    encoder = _Encoder()
    return encoder.encode(tree, ""), encoder.tensors


def _below(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor | TensorSlice] = {}
        self._keys: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_KIND: "float", "text": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, TensorSlice):
            return self._slice(value, path)
        if isinstance(value, Mapping):
            items = [(key, self.encode(each, _below(path, key))) for key, each in value.items()]
            if all(type(key) is str and key != _KIND for key, _ in items):
                return dict(items)
            return {_KIND: "dict", "items": [[self.encode(key, path), each] for key, each in items]}
        if isinstance(value, (list, tuple)):
            several = [self.encode(each, _below(path, i)) for i, each in enumerate(value)]
            return several if isinstance(value, list) else {_KIND: "tuple", "items": several}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
            tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
            return {_KIND: "array", "scalar": isinstance(value, np.generic), "tensor": self._tensor(tensor, path)}
        if isinstance(value, (bytes, bytearray)):
            return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
        raise OptionError(
            f"A checkpoint cannot hold {path!r}: it is a {type(value).__qualname__}. It holds tensors, arrays, numbers "
            "and text, and dicts, lists and tuples of these, so that reading it executes nothing."
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise OptionError(f"A checkpoint cannot hold {path!r}: it is a {tensor.layout} tensor on {tensor.device}.")
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if real.dtype not in DTYPES:
            raise OptionError(
                f"A checkpoint cannot hold {path!r}: it is a tensor of {tensor.dtype}, which safetensors files do not "
                "have. Save its bytes: tensor.view(torch.uint8)."
            )
        return self._named(tensor, real, real, tuple(real.shape), path)

    def _slice(self, part: TensorSlice, path: str) -> dict[str, Any]:
        real = part.as_real() if part.local.is_complex() else part
        return self._named(part.local, real, real.local, real.shape, path)

    def _named(
        self, tensor: torch.Tensor, kept: torch.Tensor | TensorSlice, memory: torch.Tensor, shape: Any, path: str
    ) -> dict[str, Any]:
        place = (memory.data_ptr(), memory.dtype, shape, memory.stride(), str(memory.device))
        # Some devices do not report the address of their memory. Their tensors are never shared.
        key = self._keys.get(place) if memory.numel() and memory.data_ptr() else None
        if key is None:
            key = path or "value"
            while key in self.tensors:  # a name may contain the separator
                key += "~"
            self.tensors[key] = kept
            self._keys[place] = key
        complex_dtype = str(tensor.dtype).removeprefix("torch.") if tensor.is_complex() else None
        return {_KIND: "tensor", "name": key, **({"complex": complex_dtype} if complex_dtype else {})}


def decode(described: Any, tensors: Mapping[str, torch.Tensor | StoredTensor]) -> Any:
    """Return the tree that was encoded. Its tensors are those that are given, also if they are still in files.

    Raises:
        CheckpointError: The description is invalid, or a tensor is missing.
    """
    if isinstance(described, list):
        return [decode(each, tensors) for each in described]
    if not isinstance(described, dict):
        return described
    kind = described.get(_KIND)
    if kind is None:
        return {key: decode(each, tensors) for key, each in described.items()}
    try:
        return _KINDS[kind](described, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"This version of distnb cannot read the checkpoint: {described!r:.200}") from error


def _decode_tensor(
    described: dict[str, Any], tensors: Mapping[str, torch.Tensor | StoredTensor]
) -> torch.Tensor | StoredTensor:
    tensor = tensors[described["name"]]
    if "complex" not in described:
        return tensor
    return tensor.as_complex() if isinstance(tensor, StoredTensor) else torch.view_as_complex(tensor)


def _decode_array(described: dict[str, Any], tensors: Mapping[str, torch.Tensor | StoredTensor]) -> Any:
    array = whole(decode(described["tensor"], tensors)).numpy()
    return array[()] if described["scalar"] else array


_KINDS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor | StoredTensor]], Any]] = {
    "tensor": _decode_tensor,
    "array": _decode_array,
    "float": lambda described, _: float(described["text"]),
    "dict": lambda described, tensors: {
        decode(key, tensors): decode(each, tensors) for key, each in described["items"]
    },
    "tuple": lambda described, tensors: tuple(decode(each, tensors) for each in described["items"]),
    "bytes": lambda described, _: base64.b64decode(described["base64"]),
    "dtype": lambda described, _: getattr(torch, described["name"]),
}
