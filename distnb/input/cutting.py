"""Cutting of global batches: the bounds of slices, and the leaves of a batch's structure.

Slices are contiguous, and their sizes differ by at most one: larger ones first, replica 0 first.

Tensors and arrays are leaves. So is a list or tuple that holds one item per example (strings, label lists, images of
different sizes). Any other list, tuple, dict, namedtuple or dataclass is structure. If a list could be either (two
fields, two examples), it is structure when everything in it has the batch's size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distnb.errors import StructureError

__all__ = ["count_examples", "cut", "map_leaves", "map_parts", "slice_bounds"]

_TEXT = (str, bytes, bytearray)


def slice_bounds(n: int, replicas: int, replica_id: int) -> tuple[int, int]:
    """Return the first and one-past-last example of one replica's slice of a global batch of `n` examples.

    Example:
        >>> slice_bounds(8, 3, 2)
        (6, 8)
    """
    base, extra = divmod(n, replicas)
    start = replica_id * base + min(replica_id, extra)
    return start, start + base + (replica_id < extra)


def cut(leaf: Any, start: int, stop: int) -> Any:
    """Return examples `start` to `stop` of one leaf of a batch. The result of a tensor or array is a view."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
        return leaf.narrow_copy(0, start, stop - start)  # sparse layouts have no views
    return leaf[start:stop]


class _MisfitError(Exception):
    """Error for a part of a batch that cannot be a leaf. `path` grows while the error propagates to the root."""

    def __init__(self, part: Any, sizes_differ: bool) -> None:
        super().__init__()
        self.part = part
        self.sizes_differ = sizes_differ
        self.path = ""


def map_leaves(batch: Any, count: int, leaf: Callable[[Any], Any], *, own: bool = False) -> Any:
    """Apply a function to every tensor, array, or list of one item per example, and keep the structure around them.

    Args:
        batch: The batch, or a slice of one.
        count: The number of examples it holds.
        leaf: The function.
        own: True if the batch is a slice that was collated by itself and will not be cut. Arrays may then have any
            leading dimension, and objects of any class may be leaves.

    Raises:
        StructureError: A leaf was never batched, or leading dimensions differ from the count.
    """
    kind = type(batch)
    if (kind is list or kind is tuple) and batch:
        # Fast path: nearly every batch is a few tensors.
        for field in batch:
            if type(field) is not torch.Tensor or not field.ndim or field.shape[0] != count:
                break
        else:
            return kind([leaf(field) for field in batch])
    try:
        return _walk(batch, count, leaf, own, False)
    except _MisfitError as misfit:
        raise _explain(misfit, batch, count) from None


def map_parts(node: Any, part: Callable[[Any], Any]) -> Any:
    """Apply a function to every part of a structure that is not a container, batched or not."""
    keys = _keys(node)
    if keys is None:
        return part(node)
    return _rebuild(node, keys, [map_parts(_child(node, key), part) for key in keys])


def count_examples(batch: Any) -> int:
    """Return the number of examples in a whole batch. Raise StructureError if leaves disagree or one is unbatched."""
    likeliest = None
    for count in _candidates(batch):
        if _fits(batch, count):
            return count
        likeliest = count if likeliest is None else likeliest
    # No count fits: walk the batch with the likeliest count to raise an error that names the leaf.
    map_leaves(batch, likeliest or 0, lambda leaf: leaf)
    raise StructureError(f"A batch contains no tensor, array or list ({_short(batch)}). Yield batches of tensors.")


def _walk(node: Any, count: int, leaf: Callable[[Any], Any], own: bool, listed: bool) -> Any:
    if node is None:
        return None
    keys = _keys(node)
    if keys is None:
        length = _length(node)
        if length == count or (own and (length >= 0 or _is_object(node))):
            return leaf(node)
        raise _MisfitError(node, length >= 0)
    if _is_list(node) and ((listed and len(node) == count) or _is_per_example(node, count, own)):
        return leaf(node)
    children = [_child(node, key) for key in keys]
    listed = _some_listed(children, count, own)
    mapped = []
    for key, child in zip(keys, children, strict=True):
        try:
            mapped.append(_walk(child, count, leaf, own, listed))
        except _MisfitError as misfit:
            misfit.path = (f".{key}" if _has_fields(node) else f"[{key!r}]") + misfit.path
            raise
    return _rebuild(node, keys, mapped)


def _keys(node: Any) -> Sequence[Any] | None:
    """Return the names of a container's children, or None if the node is not a container."""
    if isinstance(node, (list, tuple)):
        if hasattr(node, "to"):
            return None  # a packed sequence: a tuple by implementation, a single object by meaning
        fields: Sequence[Any] | None = getattr(node, "_fields", None)
        return range(len(node)) if fields is None else fields
    if isinstance(node, Mapping):
        return list(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [field.name for field in dataclasses.fields(node)]
    return None


def _has_fields(node: Any) -> bool:
    return hasattr(node, "_fields") or dataclasses.is_dataclass(node)


def _child(node: Any, key: Any) -> Any:
    return getattr(node, key) if _has_fields(node) else node[key]


def _rebuild(node: Any, keys: Sequence[Any], mapped: list[Any]) -> Any:
    kind = type(node)
    if kind is list:
        return mapped
    if kind is tuple:
        return tuple(mapped)
    if kind is dict:
        return dict(zip(keys, mapped, strict=True))
    if isinstance(node, (list, tuple)):
        return kind(*mapped) if hasattr(node, "_fields") else kind(mapped)
    # Classes with their own constructors (a tokenizer's batch encoding, a dataclass): copy, then fill.
    clone = copy.copy(node)
    for key, value in zip(keys, mapped, strict=True):
        if isinstance(node, Mapping):
            clone[key] = value
        else:
            object.__setattr__(clone, key, value)
    return clone


def _is_per_example(node: list[Any] | tuple[Any, ...], count: int, own: bool) -> bool:
    """Return whether a list holds one item per example and cannot be structure."""
    if len(node) != count:
        return False
    if all(_fits(item, count) for item in node):
        return count == 0
    # A slice collated by itself may hold arrays of any leading dimension next to one of the batch's size.
    return not (own and any(_is_array(item) and _length(item) == count for item in node))


def _some_listed(children: list[Any], count: int, own: bool) -> bool:
    """Return whether a list among siblings surely holds one item per example; its equally long siblings then do, too.

    Three images of three channels next to three dicts of boxes are three examples, not three fields.
    """
    lists = [child for child in children if _is_list(child)]
    return len(lists) > 1 and any(_is_per_example(child, count, own) and _holds_arrays(child) for child in lists)


def _holds_arrays(node: Any) -> bool:
    """Return whether a part contains an array. Lists of strings, for example, do not decide about a pair of fields."""
    keys = _keys(node)
    return _is_array(node) if keys is None else any(_holds_arrays(_child(node, key)) for key in keys)


def _fits(node: Any, count: int) -> bool:
    """Return whether a part of a batch can be cut as part of a batch of that many examples."""
    if node is None:
        return True
    keys = _keys(node)
    if keys is None:
        return _length(node) == count
    return (_is_list(node) and len(node) == count) or all(_fits(_child(node, key), count) for key in keys)


def _candidates(batch: Any) -> Iterator[int]:
    """Yield numbers of examples that a whole batch may hold, the likeliest first.

    Collated batches are fields of arrays, so axis 0 of the first array is the best candidate. A list of tuples or dicts
    of one form holds examples that were not collated. The lengths of inner lists come last. If the outermost list
    contains arrays, its length is not a candidate: fields of different lengths must not be mistaken for examples.
    """
    if isinstance(batch, (list, tuple)) and not batch:
        return
    array, lists = _first_leaf(batch)
    if array is not None and array.shape:
        yield int(array.shape[0])
    if not _is_list(batch):
        yield from lists
    elif array is not None and _are_examples(batch):
        yield len(batch)
    elif array is None:
        yield from lists
    else:
        yield from lists[:-1]


def _first_leaf(node: Any) -> tuple[Any, list[int]]:
    """Return the first array of a part, if any, and the lengths of the lists around the first leaf, innermost first."""
    keys = _keys(node)
    if keys is None:
        length = _length(node)
        return (node, []) if _is_array(node) else (None, [length] if length >= 0 else [])
    array: Any = None
    lists: list[int] = []
    for key in keys:
        child_array, child_lists = _first_leaf(_child(node, key))
        array = child_array if array is None else array
        lists = lists or child_lists
        if array is not None:
            break
    if _is_list(node):
        lists = [*lists, len(node)]
    return array, lists


def _are_examples(batch: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether the outermost list holds examples: several tuples, dicts or objects of one form."""
    if not isinstance(batch, list):
        return False
    if len({type(item) for item in batch}) != 1 or isinstance(batch[0], list):
        return False
    keys = [_keys(item) for item in batch]
    return keys[0] is not None and all(key == keys[0] for key in keys)


def _is_list(node: Any) -> bool:
    """Return whether a container is a list or tuple without named fields."""
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields") and not hasattr(node, "to")


def _is_array(node: Any) -> bool:
    shaped = isinstance(getattr(node, "shape", None), tuple) and hasattr(node, "__getitem__")
    return shaped and not isinstance(node, np.generic)


def _is_object(node: Any) -> bool:
    """Return whether a part is an object of a class that can hold many examples."""
    return not isinstance(node, (*_TEXT, int, float, complex, np.generic)) and not _is_array(node)


def _length(node: Any) -> int:
    """Return the number of entries along the first axis of an array or sequence; -1 for anything else."""
    if _is_array(node):
        return int(node.shape[0]) if node.shape else -1
    return len(node) if isinstance(node, Sequence) and not isinstance(node, _TEXT) and not hasattr(node, "to") else -1


def _short(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _explain(misfit: _MisfitError, batch: Any, count: int) -> StructureError:
    where = f"batch{misfit.path}"
    if misfit.sizes_differ:
        first = next(_leading(batch, "batch"), None)
        other = f"while {first[0]} has {first[1]}" if first and first[1] == count else f"in a batch of {count} examples"
        return StructureError(
            f"{where} has {_length(misfit.part)} entries along axis 0, {other}. Every tensor, array and list of a "
            "batch must have one entry per example along axis 0, so that it can be cut among the replicas. "
            "Transpose or pad it where the batch is made (for example in the collate_fn)."
        )
    if hasattr(misfit.part, "to") and not isinstance(misfit.part, torch.Tensor):
        return StructureError(
            f"{where} is a {type(misfit.part).__name__}, which cannot be cut among the replicas. If each replica may "
            'collate its own slice, pass InputOptions(collate="slice"); else collate into tensors.'
        )
    return StructureError(
        f"{where} is {_short(misfit.part)}: one value for the whole batch that was never batched, so it cannot be cut "
        "among the replicas. Give it one entry per example along axis 0 (torch.full((n,), value)), leave it out of the "
        "batch and compute it in the step function, or, if the elements are single examples, batch them "
        "(a DataLoader with batch_size=…, or distribute_dataset(…, batch_size=…))."
    )


def _leading(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the path of each leaf of a batch that has a first axis, with the size of that axis."""
    if _is_array(node) and node.shape:
        yield path, node.shape[0]
    for key in _keys(node) or ():
        yield from _leading(_child(node, key), path + (f".{key}" if _has_fields(node) else f"[{key!r}]"))
