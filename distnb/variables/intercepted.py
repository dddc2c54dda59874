"""Tensors that represent a remote value: torch's functions receive the value, and in-place changes reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch

from distnb.errors import ContextError
from distnb.values.structure import map_structure
from distnb.variables.torch_functions import changes, is_fact

__all__ = ["Intercepted"]


class Intercepted:
    """A tensor that represents a value: the base class of variables and of their views."""

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        met: list[tuple[Intercepted, torch.Tensor]] = []
        if not is_fact(function, name):
            target = args[0] if args else kwargs.get("tensor")  # the name of the argument in torch.nn.init
            if changes(name) and _is_elsewhere(target):
                return target._change_whole(function, name, args, kwargs)
            if changes(name) and isinstance(target, (list, tuple)):  # the case of torch._foreach_add_
                for each in filter(_is_elsewhere, target):
                    raise each._refused(name)
            out = kwargs.get("out")
            for each in filter(_is_elsewhere, out if isinstance(out, (list, tuple)) else (out,)):
                raise each._refused(f"{name} with out=variable")

            def operand(leaf: Any) -> Any:
                if not isinstance(leaf, Intercepted):
                    return leaf
                met.append((leaf, leaf._operand(name)))
                return met[-1][1]

            args, kwargs = map_structure(operand, (tuple(args), kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        for leaf, tensor in met:
            result = leaf._result_of(tensor, function, args, kwargs, result)
        return result

    def _operand(self, name: str) -> torch.Tensor:
        """Return the value, for a torch function that computes with it."""
        raise NotImplementedError

    def _result_of(self, operand: torch.Tensor, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return the caller's result of a function that received `operand` in place of this tensor."""
        return result

    def _is_elsewhere(self) -> bool:
        """Return whether, in the calling context, a change in place here would miss part of the value."""
        return False

    def _change_whole(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Apply a torch function that changes its first argument to the whole value."""
        raise self._refused(name)

    def _refused(self, what: str) -> ContextError:
        """Return the error for a change that is not possible."""
        raise NotImplementedError


def _is_elsewhere(value: Any) -> TypeGuard[Intercepted]:
    return isinstance(value, Intercepted) and value._is_elsewhere()
