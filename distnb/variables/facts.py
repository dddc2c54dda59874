"""What torch may be asked of a variable without its value being read: shapes, dtypes, flags."""

from __future__ import annotations

import types
from typing import Any

__all__ = ["is_fact"]

_GETTERS = ("real", "imag", "T", "H", "mT", "mH")
_FACTS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "__len__"),
        *("data_ptr", "untyped_storage", "storage", "get_device", "is_pinned", "is_shared", "_is_view", "__hash__"),
        *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_conj", "is_neg"),
        *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "has_names"),
        *("is_same_size", "_has_compatible_shallow_copy_type", "__dir__"),
    }
)


def is_fact(function: Any, name: str) -> bool:
    """Whether a function of torch asks for what is the same on every replica: shapes, dtypes, flags, not the value."""
    if name == "__get__":
        owner = getattr(function, "__self__", None)
        return not (isinstance(owner, types.GetSetDescriptorType) and owner.__name__ in _GETTERS)
    return name in _FACTS
