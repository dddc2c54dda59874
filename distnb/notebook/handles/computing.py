"""Computing with handles: where `loss + 1`, `torch.stack(losses)` and `round(loss)` of mirrored objects happen.

What is computed of handles alone is computed on the replicas, and its result is a handle. Where one of the notebook's
own tensors takes part, the notebook computes, with copies: that tensor may be part of a graph of its autograd, or what
is to be changed. Unless the replicas' graph would end there: then the tensor goes to them, and gradients reach the
model, as from `cross_entropy(model(x), y)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distnb.errors import DistributedValueError
from distnb.notebook.handles.state import state_of_handle
from distnb.values import DistributedValues, Mirrored, structure

if TYPE_CHECKING:
    from distnb.notebook.namespace.handle_operations import HandleOperations

__all__ = ["FORWARDED", "compute", "special_methods"]

_BITWISE = ("and_", "or_", "xor", "lshift", "rshift")
_TWO_SIDED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", *_BITWISE)
_IN_PLACE = frozenset(f"i{name.rstrip('_')}" for name in _TWO_SIDED)
"""Names of the functions of `operator` that change their first argument, where it can be changed."""


def compute(
    operations: HandleOperations,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a function that has handles among its arguments: torch's, or one of `operator`.

    Args:
        operations: Those of one of the handles.
        function: It travels by its name.

    Raises:
        DistributedValueError: A value that differs from replica to replica is among them, or a graph of the replicas
            and one of the notebook's would have to become one.
        BaseException: What the function raises.
    """
    import torch

    given = (tuple(args), dict(kwargs or {}))
    leaves, _ = structure.flatten(given)
    handles = [leaf for leaf in leaves if isinstance(leaf, DistributedValues)]
    for handle in handles:
        if not isinstance(handle, Mirrored):
            handle._refuse("has no arithmetic")
    changed = _changed_by(function, *given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if (
        isinstance(changed, DistributedValues)
        or not tensors
        or (changed is None and _would_lose_graph(function, handles, tensors))
    ):
        anchor = changed if isinstance(changed, DistributedValues) else handles[0]
        return operations.run(anchor, "apply", (function, *args), kwargs)
    copied: dict[int, Any] = {id(handle): operations.read(handle) for handle in handles}
    own_args, own_kwargs = structure.replace_distributed(given, lambda handle: copied[id(handle)])
    return function(*own_args, **own_kwargs)


def _would_lose_graph(
    function: Callable[..., Any], handles: Sequence[DistributedValues], tensors: Sequence[Any]
) -> bool:
    """Whether copies of the handles' tensors would lack what a backward pass has to know."""
    import torch

    if not torch.is_grad_enabled() or not any(_tracked(handle) for handle in handles):
        return False
    if any(tensor.requires_grad for tensor in tensors):
        raise DistributedValueError(
            f"{getattr(function, '__name__', function)} got a tensor that the replicas compute gradients for, and one "
            "that the notebook does, and no gradient crosses from one to the other. Write .detach() behind the one "
            "that needs none (for values alone, compute under torch.no_grad()), or compute on the replicas: in a "
            "%%distribute cell, or a function that strategy.run calls."
        )
    return True


def _tracked(handle: DistributedValues) -> bool:
    summaries = [fact.summary for fact in state_of_handle(handle).facts.values()]
    if not any(summary is None or summary.shape for summary in summaries):
        return False
    return getattr(handle, "requires_grad", False) is True


def _changed_by(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a function changes in place; None if nothing."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = getattr(function, "__name__", "")
    changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return args[0] if args and changes and name not in ("and_", "or_") else None


def special_methods(
    call: Callable[[Any, Callable[..., Any], tuple[Any, ...]], Any],
) -> dict[str, Callable[..., Any]]:
    """The methods of all arithmetic, by name. Comparisons and containers are not among them.

    Args:
        call: Told the object that an operator was used on, calls a function with arguments; that object is among them.
    """

    def straight(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *others: call(self, function, (self, *others))

    def reflected(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, other: call(self, function, (other, self))

    names = ["neg", "pos", "abs", "invert", *_TWO_SIDED, *sorted(_IN_PLACE)]
    methods = {f"__{name.rstrip('_')}__": straight(getattr(operator, name)) for name in names}
    methods |= {f"__r{name.rstrip('_')}__": reflected(getattr(operator, name)) for name in _TWO_SIDED}
    return methods | {
        "__round__": straight(round),
        "__divmod__": straight(divmod),
        "__rdivmod__": reflected(divmod),
        "__bool__": straight(operator.truth),
    }


FORWARDED = special_methods(lambda handle, function, args: compute(state_of_handle(handle).operations, function, args))
"""The special methods of a mirrored handle that are computed so."""
