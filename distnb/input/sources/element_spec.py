"""The structure, shapes and dtypes of the batches of a distributed dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distnb.errors import StructureError
from distnb.input.cutting import count_examples, map_leaves, map_parts
from distnb.values.distributed import PerReplica

__all__ = ["TensorSpec", "spec_of"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one leaf of a batch.

    Attributes:
        shape: The shape, with None for the axis of examples, whose size varies. The other axes are those of the first
            batch.
        dtype: A dtype of torch or NumPy; for a list of one item per example, the class of the items.
    """

    shape: tuple[int | None, ...]
    dtype: Any


def spec_of(batch: Any, num_replicas: int, *, as_it_is: bool = False) -> Any:
    """Return the structure of a batch with a `TensorSpec` for each leaf, per replica if there are several.

    A batch that is not cut (`as_it_is`) may be anything.
    """

    def leaf(node: Any) -> Any:
        spec = _spec(node)
        return spec if num_replicas == 1 else PerReplica([spec] * num_replicas)

    try:
        return map_leaves(batch, count_examples(batch), leaf, own=True)
    except StructureError:
        if num_replicas > 1 and not as_it_is:
            raise
        return map_parts(batch, lambda part: None if part is None else leaf(part))


def _spec(node: Any) -> TensorSpec:
    shape = getattr(node, "shape", None)
    if shape is not None:
        return TensorSpec((None, *map(int, shape[1:])) if len(shape) else (), node.dtype)
    if isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
        return TensorSpec((None,), type(node[0]) if len(node) else object)
    return TensorSpec((), type(node))
