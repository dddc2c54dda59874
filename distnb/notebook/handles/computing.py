"""Operators and torch's functions with handles of mirrored objects: `loss + 1`, `torch.stack(losses)`, `round(loss)`.

The notebook computes with copies of the objects. They are constants: no gradient crosses between the replicas and the
notebook, and nothing that the notebook computes changes an object of the replicas.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from distnb.errors import DistributedValueError
from distnb.notebook.handles.state import state_of_handle
from distnb.values import DistributedValues, Mirrored, structure

__all__ = ["OPERATORS", "compute", "refuse_change"]


def compute(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call a function of torch or of `operator` with copies of the objects whose handles are among the arguments.

    Raises:
        DistributedValueError: An argument differs from replica to replica, the function would change a handle's object
            in place, or the result would need a graph of the replicas and one of the notebook's.
        BaseException: The function's own exception.
    """
    given = (tuple(args), dict(kwargs or {}))
    leaves, _ = structure.flatten(given)
    handles = [leaf for leaf in leaves if isinstance(leaf, DistributedValues)]
    for handle in handles:
        if not isinstance(handle, Mirrored):
            handle._refuse("has no arithmetic")
    name = getattr(function, "__name__", "this function")
    for changed in structure.flatten(_changed_by(name, *given))[0]:
        if isinstance(changed, DistributedValues):
            refuse_change(changed, name)
    _check_graphs(name, leaves)
    copies = {id(handle): _constant(handle._read()) for handle in handles}
    own_args, own_kwargs = structure.replace_distributed(given, lambda handle: copies[id(handle)])
    return function(*own_args, **own_kwargs)


def _constant(value: Any) -> Any:
    """Return a tensor or a variable without its gradients; return anything else as it is."""
    return value.detach() if getattr(value, "requires_grad", False) is True and hasattr(value, "detach") else value


def _check_graphs(name: str, leaves: Sequence[Any]) -> None:
    """Raise if a handle's tensor and a tensor of the notebook's are both parts of graphs."""
    import torch

    facts = [
        fact for leaf in leaves if isinstance(leaf, DistributedValues) for fact in state_of_handle(leaf).facts.values()
    ]
    if (
        any(fact.summary.graph for fact in facts)
        and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        and torch.is_grad_enabled()
    ):
        raise DistributedValueError(
            f"{name} got a tensor whose gradients the replicas compute and a tensor whose gradients the notebook "
            "computes, but no gradient crosses between them. Call .detach() on the tensor that needs no gradient (for "
            "values alone, compute under torch.no_grad()), or compute on the replicas: in a %%distribute cell, or a "
            "function that strategy.run calls."
        )


def _changed_by(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that a function of torch changes in place, or None."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return args[0] if args and name.endswith("_") and not name.endswith(("__", "and_", "or_")) else None


def refuse_change(handle: DistributedValues, name: str) -> NoReturn:
    """Raise because a function would change a copy of the object and not the object itself."""
    state = state_of_handle(handle)
    raise DistributedValueError(
        f"{state.label} is a {state.type_name} on the replicas, and {name} would change a copy in the notebook. Change "
        "the object by one of its methods, such as value.add_(1) or variable.assign_add(1), in a %%distribute cell, or "
        "in a function that strategy.run calls. For a new value in the notebook, write `value = value + 1`."
    )


def _straight(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: compute(function, (self, *others))


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: compute(function, (other, self))


def _in_place(sign: str) -> Callable[..., NoReturn]:
    return lambda self, other: refuse_change(self, sign)


def _function(name: str) -> Callable[..., Any]:
    return getattr(operator, f"__{name}__")  # type: ignore[no-any-return]


_TWO_SIDED = {
    "add": "+=",
    "sub": "-=",
    "mul": "*=",
    "matmul": "@=",
    "truediv": "/=",
    "floordiv": "//=",
    "mod": "%=",
    "pow": "**=",
    "and": "&=",
    "or": "|=",
    "xor": "^=",
    "lshift": "<<=",
    "rshift": ">>=",
}
OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": _straight(_function(name)) for name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge")},
    **{f"__{name}__": _straight(_function(name)) for name in _TWO_SIDED},
    **{f"__r{name}__": _reflected(_function(name)) for name in _TWO_SIDED},
    **{f"__i{name}__": _in_place(sign) for name, sign in _TWO_SIDED.items()},
    "__round__": _straight(round),
    "__divmod__": _straight(divmod),
    "__rdivmod__": _reflected(divmod),
}
"""The operators of a mirrored handle, by the names of their special methods."""
