"""Nested structures: containers, leaves, and the distributed values in them.

Containers are dict (and its subclasses), list, tuple, namedtuple and dataclass instances. Everything else is a leaf,
including None. The order of a dict does not matter: two dicts with the same keys have the same structure. Importing
this loads no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

from distnb.errors import StructureError
from distnb.values.distributed import DistributedValues, PerReplica

__all__ = [
    "LEAF",
    "children",
    "flatten",
    "has_distributed",
    "is_immutable",
    "map_structure",
    "paths",
    "regroup",
    "replace_distributed",
    "select",
    "structure_of",
    "unflatten",
    "unlike_structures",
]

_Kind = Literal["leaf", "value", "dict", "list", "tuple", "named", "data"]


_kinds: dict[type, _Kind] = {}


def _kind_of(cls: type) -> _Kind:
    """Return the kind of container that a class is. The result is cached, because `select` needs it for every leaf."""
    return _kinds.get(cls) or _kinds.setdefault(cls, _classify(cls))


def _classify(cls: type) -> _Kind:
    if issubclass(cls, DistributedValues):
        return "value"
    if issubclass(cls, dict):
        return "dict"
    if issubclass(cls, list):
        return "list"
    if issubclass(cls, tuple):
        if cls.__module__ == "torch" and cls.__name__ == "Size":
            return "leaf"
        return "named" if hasattr(cls, "_fields") else "tuple"
    return "data" if dataclasses.is_dataclass(cls) else "leaf"


def _children(kind: _Kind, tree: Any) -> list[tuple[Any, Any]]:
    """Return (key, child) pairs in an order that does not depend on how a dict was filled. Paths show the key."""
    if kind == "dict":
        try:
            return sorted(tree.items(), key=lambda pair: pair[0])
        except TypeError:
            return sorted(tree.items(), key=lambda pair: (type(pair[0]).__name__, repr(pair[0])))
    if kind == "data":
        names = (field.name for field in dataclasses.fields(tree))
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return list(zip(tree._fields, tree, strict=True)) if kind == "named" else list(enumerate(tree))


def _rebuild(kind: _Kind, model: Any, children: Sequence[Any]) -> Any:
    """Return a container like `model` with other children, given in the order of `_children`."""
    cls = type(model)
    if kind in ("list", "tuple"):
        return cls(children)
    if kind == "named":
        return cls._make(children)
    keys = [key for key, _ in _children(kind, model)]
    if kind == "dict":
        copied = model.copy()  # keeps the order, a defaultdict's factory, a user class's attributes
        for key, child in zip(keys, children, strict=True):
            copied[key] = child
        return copied
    copied = object.__new__(cls)
    for name, value in [*getattr(model, "__dict__", {}).items(), *zip(keys, children, strict=True)]:
        object.__setattr__(copied, name, value)  # frozen ones too
    return copied


def children(tree: Any, most: int | None = None) -> list[tuple[str, Any]] | None:
    """Return the children of a container, each with the code that selects it (`[0]`, `.name`), or None for a leaf.

    Of a list or tuple only the first `most` are returned: it may have millions.
    """
    kind = _kind_of(type(tree))
    if kind in ("leaf", "value"):
        return None
    if kind in ("list", "tuple"):
        return [(f"[{place}]", child) for place, child in enumerate(itertools.islice(tree, most))]
    return [(f".{key}" if kind in ("data", "named") else f"[{key!r}]", child) for key, child in _children(kind, tree)]


LEAF = "*"
"""The text of a leaf in the result of `structure_of`."""


def structure_of(tree: Any) -> str:
    """Return the structure of a tree without its leaves, as text. Equal texts mean equal structures.

    A distributed value is a leaf. Containers of different classes differ.
    """
    kind, name = _kind_of(type(tree)), type(tree).__name__
    if kind in ("leaf", "value"):
        return LEAF
    pairs = [(key, structure_of(child)) for key, child in _children(kind, tree)]
    if kind in ("named", "data"):
        return f"{name}({', '.join(f'{key}={child}' for key, child in pairs)})"
    if kind == "dict":
        inner = "{" + ", ".join(f"{key!r}: {child}" for key, child in pairs) + "}"
    else:
        inner = ", ".join(child for _, child in pairs)
        inner = f"[{inner}]" if kind == "list" else f"({inner}{',' if len(pairs) == 1 else ''})"
    return inner if name == kind else f"{name}({inner})"


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree in canonical order, and the model that `unflatten` needs to replace them.

    Raises:
        StructureError: The tree contains itself, or is deeper than Python can walk.
    """
    leaves: list[Any] = []
    try:
        _collect(tree, leaves)
    except RecursionError:
        raise StructureError(
            f"A {type(tree).__name__} contains itself, or is nested too deeply, so its values can't be taken one by "
            "one. Return or pass the parts that you need, or put it into an object of a class of your own: such an "
            "object counts as one value."
        ) from None
    return leaves, tree


def _collect(tree: Any, leaves: list[Any]) -> None:
    kind = _kind_of(type(tree))
    if kind in ("leaf", "value"):
        leaves.append(tree)
    else:
        for _, child in _children(kind, tree):
            _collect(child, leaves)


def unflatten(shape: Any, leaves: Iterable[Any]) -> Any:
    """Return a tree of the structure that `flatten` returned, with these leaves."""
    return _filled(shape, iter(leaves))


def _filled(model: Any, leaves: Iterator[Any]) -> Any:
    kind = _kind_of(type(model))
    if kind in ("leaf", "value"):
        return next(leaves)
    return _rebuild(kind, model, [_filled(child, leaves) for _, child in _children(kind, model)])


def paths(tree: Any) -> list[str]:
    """Return the path of each leaf of `flatten`, as code that follows a name: `['loss'][0]`."""
    inner = children(tree)
    if inner is None:
        return [""]
    return [name + path for name, child in inner for path in paths(child)]


def map_structure(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with the function applied to each leaf."""
    leaves, shape = flatten(tree)
    return unflatten(shape, map(function, leaves))


# -- distributed values in structures ------------------------------------------------------------------------------


def has_distributed(tree: Any) -> bool:
    """Return whether the tree contains a distributed value."""
    return any(isinstance(leaf, DistributedValues) for leaf in flatten(tree)[0])


def replace_distributed(tree: Any, function: Callable[[DistributedValues], Any]) -> Any:
    """Return the tree with each distributed value replaced by the function's result.

    Containers without distributed values are returned as the same objects.
    """
    kind = _kind_of(type(tree))
    if kind == "leaf":
        return tree
    if kind == "value":
        return function(tree)
    before = [child for _, child in _children(kind, tree)]
    after = [replace_distributed(child, function) for child in before]
    return _rebuild(kind, tree, after) if any(new is not old for new, old in zip(after, before, strict=True)) else tree


def select(
    tree: Any,
    replica_id: int,
    num_replicas: int | None = None,
    seen: Callable[[DistributedValues, Any], None] | None = None,
) -> Any:
    """Return the tree as one replica sees it: every distributed value replaced by that replica's component.

    Args:
        tree: Any structure.
        replica_id: The replica.
        num_replicas: The number of replicas that every distributed value must have; None accepts any.
        seen: A function called with each distributed value and the component taken from it.

    Raises:
        StructureError: A value has components for more or for fewer replicas.
    """

    def pick(value: DistributedValues) -> Any:
        if num_replicas is not None and value.num_replicas != num_replicas:
            raise StructureError(
                f"A {type(value).__name__} with components for {value.num_replicas} replica(s) was given to a strategy "
                f"of {num_replicas}. Each replica takes the component of its own id; make the value with this "
                "strategy (distribute_dataset, distribute_values_from_function, run)."
            )
        component = value.component(replica_id)
        if seen is not None:
            seen(value, component)
        return component

    return replace_distributed(tree, pick)


def is_immutable(value: Any) -> bool:
    """Return whether a leaf is a plain immutable Python value: a number, text, an enum member, a dtype, None, …"""
    if value is None or isinstance(value, (bool, int, float, str, bytes, complex, Enum, range)):
        return True
    if isinstance(value, (numbers.Number, PurePath, date, time, timedelta)):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, (torch.dtype, torch.device, torch.Size))


def regroup(trees: Sequence[Any]) -> Any:
    """Combine the trees of the replicas into one, leaf by leaf.

    None on all replicas stays None, and the same immutable Python value on all stays that value. Everything else
    becomes a PerReplica. A single tree is returned unchanged.

    Raises:
        StructureError: The structures differ; the message shows both.
    """
    first = trees[0]
    if len(trees) == 1:
        return first
    specs = [structure_of(tree) for tree in trees]
    for replica, spec in enumerate(specs):
        if spec != specs[0]:
            raise unlike_structures({0: specs[0], replica: spec})
    leaves = zip(*(flatten(tree)[0] for tree in trees), strict=True)
    return unflatten(first, (group[0] if _all_same(group) else PerReplica(group) for group in leaves))


def _all_same(leaves: Sequence[Any]) -> bool:
    """Return whether the leaves are the same immutable value of the same type. NaN counts as equal to NaN."""
    first = leaves[0]
    return is_immutable(first) and all(
        type(other) is type(first) and (bool(first == other) or (first != first and other != other))
        for other in leaves[1:]
    )


def unlike_structures(specs: dict[int, str]) -> StructureError:
    """Return the error for results whose structures differ by replica."""
    shown = "\n".join(f"  replica {replica}: {spec}" for replica, spec in specs.items())
    return StructureError(
        f"The replicas returned different structures:\n{shown}\nReturn the same containers with the same keys on every "
        "replica; a leaf may differ in value, shape or type, and may be None."
    )
