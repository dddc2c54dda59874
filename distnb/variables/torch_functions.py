"""Classification of torch's functions: whether they read a variable's value, and whether they change it."""

from __future__ import annotations

import types
from typing import Any

__all__ = ["changes", "is_fact"]

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
_IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"})


def is_fact(function: Any, name: str) -> bool:
    """Return whether a function of torch concerns shapes, dtypes, flags or gradients, and not the value.

    Every strategy's backward pass stores gradients, so access to gradients does not count as a read of the value.
    """
    if name == "__get__":
        owner = getattr(function, "__self__", None)
        return not (isinstance(owner, types.GetSetDescriptorType) and owner.__name__ in _GETTERS)
    if name in ("__set__", "__delete__"):
        return getattr(getattr(function, "__self__", None), "__name__", "") in _SETTERS
    return name in _FACTS


def changes(name: str) -> bool:
    """Return whether a function of this name changes its first argument in place."""
    if name.startswith("__"):
        return name in ("__set__", "__setitem__", "__delete__") or (name[2] == "i" and name[2:-2] in _IN_PLACE)
    return name.endswith("_")
