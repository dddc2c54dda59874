"""What torch may be asked of a variable without its value being read: shapes, dtypes, flags."""

from __future__ import annotations

import types
from typing import Any

__all__ = ["is_fact"]

_GETTERS = ("real", "imag", "T", "H", "mT", "mH")
_SETTERS = ("grad", "requires_grad")
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
    """Whether a function of torch has to do with shapes, dtypes, flags or gradients, and not with the value.

    Gradients are put aside during every backward pass, whichever strategy's.
    """
    if name == "__get__":
        owner = getattr(function, "__self__", None)
        return not (isinstance(owner, types.GetSetDescriptorType) and owner.__name__ in _GETTERS)
    if name in ("__set__", "__delete__"):
        return getattr(getattr(function, "__self__", None), "__name__", "") in _SETTERS
    return name in _FACTS
