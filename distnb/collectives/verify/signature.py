"""The signature of a collective, which replicas compare: operation, reduce op, root, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distnb.collectives.digests import digest_of_text
from distnb.collectives.verify import callsite
from distnb.collectives.verify.collective_log import CollectiveRecord

__all__ = ["Key", "of_tensors", "record"]

Key = tuple[Any, ...]
"""(operation, number of the reduce op or text or None, root or None, kind of device, shape, dtype, shape, dtype, …)."""

_OPS = {0: "sum", 1: "avg", 2: "product", 3: "min", 4: "max", 5: "band", 6: "bor", 7: "bxor", 8: "premul_sum"}
_records: dict[tuple[Key, bytes], CollectiveRecord] = {}
_MANY = 10_000
_SHOWN = 3


def of_tensors(operation: str, op: int | None, root: int | str | None, tensors: Sequence[torch.Tensor]) -> Key:
    """Return the signature of a collective over these tensors of this replica."""
    if len(tensors) == 1:
        tensor = tensors[0]
        return (operation, op, root, tensor.device.type, tensor.shape, tensor.dtype)
    parts: list[Any] = [operation, op, root, tensors[0].device.type if tensors else "cpu"]
    for tensor in tensors:
        parts.append(tensor.shape)
        parts.append(tensor.dtype)
    return tuple(parts)


def record(key: Key) -> CollectiveRecord:
    """Return the record of a collective with this signature at the user's innermost frame."""
    site = callsite.current()
    known = _records.get((key, site.identity))
    if known is not None:
        return known
    if len(_records) > _MANY:  # shapes that never repeat
        _records.clear()
    signature = digest_of_text(repr(key)).to_bytes(8, "little")
    made = _records[key, site.identity] = CollectiveRecord(signature + site.identity, describe(key), site.place)
    return made


def describe(key: Key) -> str:
    """Return the signature for people: `all_reduce(float32[10], sum)`."""
    operation, op, root, device, *rest = key
    parts = []
    tensors = list(zip(rest[::2], rest[1::2], strict=True))
    for shape, dtype in tensors[:_SHOWN]:
        dims = ", ".join(map(str, shape)) if isinstance(shape, (tuple, torch.Size)) else str(shape)
        parts.append(f"{str(dtype).removeprefix('torch.')}[{dims}]")
    if len(tensors) > _SHOWN:
        parts.append(f"… {len(tensors)} tensors")
    if device != "cpu":
        parts.append(f"on {device}")
    if op is not None:
        parts.append(_OPS.get(op, str(op)))
    if root is not None:
        parts.append(f"root={root}")
    return f"{operation}({', '.join(parts)})"
