"""Nested structures: what is a container, what is a leaf, and how distributed values sit in them.

Containers are dict (and its subclasses), list, tuple, namedtuple and dataclass instances; everything else is a leaf,
None too. Order does not matter in dicts: two with the same keys have the same structure. Importing this loads no torch.
"""

from __future__ import annotations

import dataclasses
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

from distnb.errors import StructureError
from distnb.values.distributed import DistributedValues, PerReplica

__all__ = [
    "LEAF",
    "Spec",
    "flatten",
    "has_distributed",
    "is_immutable",
    "map_structure",
    "paths",
    "regroup",
    "replace_distributed",
    "same_value",
    "select",
    "structure_of",
    "unflatten",
    "unlike_structures",
]

_Kind = Literal["leaf", "value", "dict", "list", "tuple", "named", "data"]

_kinds: dict[type, _Kind] = {}


def _kind_of(cls: type) -> _Kind:
    """How instances of a class are taken apart; remembered per class, because `select` asks for every leaf."""
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _classify(cls)
    return kind


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
    if dataclasses.is_dataclass(cls):
        return "data"
    return "leaf"


def _children(kind: _Kind, tree: Any) -> list[tuple[Any, Any]]:
    """(key, child) pairs; the key is what a path shows."""
    if kind == "dict":
        return list(tree.items())
    if kind == "data":
        return [
            (field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        ]
    return list(zip(tree._fields, tree, strict=True)) if kind == "named" else list(enumerate(tree))


def _rebuild(kind: _Kind, model: Any, children: Sequence[Any]) -> Any:
    """A container like `model`, with other children in the order of `_children`."""
    cls = type(model)
    if kind == "list":
        return list(children) if cls is list else cls(children)
    if kind == "tuple":
        return tuple(children) if cls is tuple else cls(children)
    if kind == "named":
        return cls._make(children)
    if kind == "dict":
        if cls is dict:
            return dict(zip(model, children, strict=True))
        copied = model.copy()  # keeps a defaultdict's factory, a user class's attributes
        for key, child in zip(list(model), children, strict=True):
            copied[key] = child
        return copied
    copied = object.__new__(cls)
    for name, value in getattr(model, "__dict__", {}).items():
        object.__setattr__(copied, name, value)
    for (name, _), child in zip(_children("data", model), children, strict=True):
        object.__setattr__(copied, name, child)  # frozen ones too
    return copied


# -- structure as a value of its own -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """The structure of a tree without its leaves. Equal specs are equal structures; it can be pickled and hashed.

    Attributes:
        kind: What sort of container, or "leaf".
        name: The container's class name (containers of different classes differ).
        keys: Keys or field names, in canonical order.
        children: Their structures, in the same order.
    """

    kind: str
    name: str = ""
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()

    def __str__(self) -> str:
        if self.kind == "leaf":
            return "*"
        if self.kind == "dict":
            pairs = zip(self.keys, self.children, strict=True)
            inner = "{" + ", ".join(f"{key!r}: {child}" for key, child in pairs) + "}"
            return inner if self.name == "dict" else f"{self.name}({inner})"
        if self.kind in ("named", "data"):
            pairs = zip(self.keys, self.children, strict=True)
            return f"{self.name}({', '.join(f'{key}={child}' for key, child in pairs)})"
        inner = ", ".join(map(str, self.children))
        if self.kind == "list":
            return f"[{inner}]"
        return f"({inner},)" if len(self.children) == 1 else f"({inner})"


LEAF = Spec("leaf")


def _ordered(kind: _Kind, tree: Any) -> list[tuple[Any, Any]]:
    """`_children` in an order that does not depend on how a dict was filled."""
    children = _children(kind, tree)
    if kind == "dict":
        try:
            children.sort(key=lambda pair: pair[0])
        except TypeError:
            children.sort(key=lambda pair: (type(pair[0]).__name__, repr(pair[0])))
    return children


def structure_of(tree: Any) -> Spec:
    """The structure of a tree. A distributed value is a leaf of it."""
    kind = _kind_of(type(tree))
    if kind in ("leaf", "value"):
        return LEAF
    pairs = _ordered(kind, tree)
    return Spec(
        kind, type(tree).__name__, tuple(key for key, _ in pairs), tuple(structure_of(child) for _, child in pairs)
    )


@dataclass(frozen=True)
class _Shape:
    """What `unflatten` needs: the structure, and the containers as they were."""

    spec: Spec
    model: Any


def flatten(tree: Any) -> tuple[list[Any], _Shape]:
    """The leaves of a tree in canonical order, and what `unflatten` needs to put others in their place."""
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves, _Shape(structure_of(tree), tree)


def _collect(tree: Any, leaves: list[Any]) -> None:
    kind = _kind_of(type(tree))
    if kind in ("leaf", "value"):
        leaves.append(tree)
        return
    for _, child in _ordered(kind, tree):
        _collect(child, leaves)


def unflatten(shape: _Shape, leaves: Iterable[Any]) -> Any:
    """A tree of the structure that `flatten` found, with these leaves."""
    return _fill(shape.model, iter(leaves))


def _fill(model: Any, leaves: Any) -> Any:
    kind = _kind_of(type(model))
    if kind in ("leaf", "value"):
        return next(leaves)
    if kind != "dict":
        return _rebuild(kind, model, [_fill(child, leaves) for _, child in _children(kind, model)])
    filled = {key: _fill(child, leaves) for key, child in _ordered(kind, model)}
    return _rebuild(kind, model, [filled[key] for key in model])


def paths(tree: Any) -> list[str]:
    """Where each leaf of `flatten` is, as one would write it after a name: `['loss'][0]`."""
    found: list[str] = []

    def walk(node: Any, path: str) -> None:
        kind = _kind_of(type(node))
        if kind in ("leaf", "value"):
            found.append(path)
            return
        for key, child in _ordered(kind, node):
            walk(child, f"{path}.{key}" if kind in ("data", "named") else f"{path}[{key!r}]")

    walk(tree, "")
    return found


def map_structure(function: Callable[..., Any], *trees: Any) -> Any:
    """Call a function on the corresponding leaves of trees; the result has the first one's containers.

    Raises:
        StructureError: The trees differ in structure.
    """
    specs = [structure_of(tree) for tree in trees]
    for other in specs[1:]:
        if other != specs[0]:
            raise StructureError(f"These structures do not match: {specs[0]} and {other}.")
    leaves, shape = flatten(trees[0])
    others = [flatten(tree)[0] for tree in trees[1:]]
    return unflatten(shape, (function(*group) for group in zip(leaves, *others, strict=True)))


def has_distributed(tree: Any) -> bool:
    """Whether a distributed value is anywhere in the tree."""
    kind = _kind_of(type(tree))
    if kind == "leaf":
        return False
    return kind == "value" or any(has_distributed(child) for _, child in _children(kind, tree))


# -- distributed values in structures ----------------------------------------------------------------------------------


def select(
    tree: Any,
    replica_id: int,
    num_replicas: int | None = None,
    seen: Callable[[DistributedValues, Any], None] | None = None,
) -> Any:
    """The tree as one replica sees it: every distributed value replaced by that replica's component.

    Containers without distributed values are passed through as the objects they are.

    Args:
        tree: Any structure.
        replica_id: The replica.
        num_replicas: What every distributed value must have; None takes any.
        seen: Called with each distributed value and the component taken from it.

    Raises:
        StructureError: A value has components for more or for fewer replicas.
    """
    kind = _kinds.get(type(tree)) or _kind_of(type(tree))
    if kind == "leaf":
        return tree
    if kind == "value":
        if num_replicas is not None and tree.num_replicas != num_replicas:
            raise StructureError(
                f"A {type(tree).__name__} with components for {tree.num_replicas} replica(s) was given to a strategy "
                f"of {num_replicas}. Each replica takes the component of its own id; make the value with this "
                "strategy (distribute_dataset, distribute_values_from_function, run)."
            )
        component = tree.component(replica_id)
        if seen is not None:
            seen(tree, component)
        return component
    if kind == "dict":
        children = [select(child, replica_id, num_replicas, seen) for child in tree.values()]
        changed = any(new is not old for new, old in zip(children, tree.values(), strict=True))
    elif kind == "data":
        pairs = _children(kind, tree)
        children = [select(child, replica_id, num_replicas, seen) for _, child in pairs]
        changed = any(new is not old for new, (_, old) in zip(children, pairs, strict=True))
    else:
        children = [select(child, replica_id, num_replicas, seen) for child in tree]
        changed = any(new is not old for new, old in zip(children, tree, strict=True))
    return _rebuild(kind, tree, children) if changed else tree


def replace_distributed(tree: Any, function: Callable[[DistributedValues], Any]) -> Any:
    """The tree with something else for each distributed value; containers without any stay the objects they are."""
    kind = _kind_of(type(tree))
    if kind == "leaf":
        return tree
    if kind == "value":
        return function(tree)
    before = [child for _, child in _children(kind, tree)]
    after = [replace_distributed(child, function) for child in before]
    return _rebuild(kind, tree, after) if any(new is not old for new, old in zip(after, before, strict=True)) else tree


def is_immutable(value: Any) -> bool:
    """Whether a leaf is a plain immutable Python value: a number, text, an enum member, a dtype, None, …"""
    if value is None or isinstance(value, (bool, int, float, str, bytes, complex, Enum, range)):
        return True
    if isinstance(value, (numbers.Number, PurePath, date, time, timedelta)):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, (torch.dtype, torch.device, torch.Size))


def same_value(first: Any, second: Any) -> bool:
    """Whether two immutable leaves are the same value of the same type; NaN is the same as NaN."""
    if type(first) is not type(second):
        return False
    return bool(first == second) or (first != first and second != second)


def regroup(trees: Sequence[Any]) -> Any:
    """One tree of the trees that the replicas hold, leaf by leaf.

    None on all is None, the same immutable Python value on all is that value, everything else becomes a PerReplica.
    One tree alone is returned as it is.

    Raises:
        StructureError: The structures differ; the message shows both.
    """
    first = trees[0]
    if len(trees) == 1:
        return first
    spec = structure_of(first)
    for replica, tree in enumerate(trees):
        if (other := structure_of(tree)) != spec:
            raise unlike_structures({0: spec, replica: other})
    flat = [flatten(tree)[0] for tree in trees]
    return unflatten(flatten(first)[1], (regroup_leaf(group) for group in zip(*flat, strict=True)))


def regroup_leaf(components: Sequence[Any]) -> Any:
    """One leaf of the replicas' components of it."""
    first = components[0]
    if is_immutable(first) and all(same_value(first, other) for other in components[1:]):
        return first
    return PerReplica(components)


def unlike_structures(specs: Mapping[int, object]) -> StructureError:
    """The error for results whose structures differ by replica."""
    shown = "\n".join(f"  replica {replica}: {spec}" for replica, spec in specs.items())
    return StructureError(
        f"The replicas returned different structures:\n{shown}\nReturn the same containers with the same keys on every "
        "replica; a leaf may differ in value, shape or type, and may be None."
    )
