"""Arithmetic and torch's functions with handles of mirrored objects: `loss + 1`, `torch.stack(losses)`, `round(loss)`.

If all operands are handles, the replicas compute, and the result is a handle. If one is a tensor of the notebook's, the
notebook computes with copies, because that tensor may belong to its autograd graph or be changed in place. There is one
exception: if copies would cut the replicas' graph, the tensor is sent to the replicas, so that gradients reach the
model, as in `cross_entropy(model(x), y)`.
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
"""Names of the functions of `operator` that change their first argument in place, if it is mutable."""


def compute(
    operations: HandleOperations,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a function of torch or of `operator` with arguments that include handles.

    Args:
        operations: The operations of one of the handles.
        function: The function, which is sent by its name.

    Raises:
        DistributedValueError: An argument differs from replica to replica, or the result would need a graph of the
            replicas and one of the notebook's.
        BaseException: The function's own exception.
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
    """Return whether copies of the handles' tensors would lack a graph that a backward pass needs."""
    import torch

    if not torch.is_grad_enabled() or not any(_tracked(handle) for handle in handles):
        return False
    if any(tensor.requires_grad for tensor in tensors):
        raise DistributedValueError(
            f"{getattr(function, '__name__', function)} got a tensor whose gradients the replicas compute and a tensor "
            "whose gradients the notebook computes, but no gradient crosses between them. Call .detach() on the tensor "
            "that needs no gradient (for values alone, compute under torch.no_grad()), or compute on the replicas: in "
            "a %%distribute cell, or a function that strategy.run calls."
        )
    return True


def _tracked(handle: DistributedValues) -> bool:
    summaries = [fact.summary for fact in state_of_handle(handle).facts.values()]
    if not any(summary is None or summary.shape for summary in summaries):
        return False
    return getattr(handle, "requires_grad", False) is True


def _changed_by(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that a function changes in place, or None."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = getattr(function, "__name__", "")
    changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return args[0] if args and changes and name not in ("and_", "or_") else None


def special_methods(
    call: Callable[[Any, Callable[..., Any], tuple[Any, ...]], Any],
) -> dict[str, Callable[..., Any]]:
    """Return the special methods of arithmetic by name, without those of comparisons and containers.

    Args:
        call: Called with the object of the method, a function and the function's arguments, among them the object.
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
"""The special methods of a mirrored handle that `compute` implements."""
