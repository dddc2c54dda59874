"""Comparison of the data that replicas read, and agreement on the next global batch of several input pipelines.

If workers read their own pipelines, only each pipeline knows whether there is a next batch and how large it is. The
replicas therefore exchange one small message per batch. The global batch consists of the elements of all pipelines for
one step. A pipeline that has ended yields empty batches until the last one has ended. If one cannot be read, all
replicas raise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distnb import activity
from distnb.errors import ProgramError, StructureError
from distnb.input.batch_placement import BatchPlacement
from distnb.input.cutting import map_parts
from distnb.input.dealing import ReplicaInput
from distnb.input.reading import Batch, Reader, empty_like, may_be_empty
from distnb.values.distributed import PerReplica

__all__ = ["Agree", "OwnData", "SameData"]

Agree = Callable[[Any], Sequence[Any]]
"""A function that gathers one small value of each replica on all, in replica order."""


class SameData:
    """An iteration of replicas that read the same global batches. The first batch and the end are compared."""

    def __init__(self, reader: Reader, agree: Agree | None) -> None:
        self._reader = reader
        self._agree = agree
        self._batches = 0
        self._digest = 0

    def next(self) -> Any:
        """Return the replica's part of the next batch. Raise StructureError if replicas read different data."""
        try:
            batch = self._reader.read()
        except StopIteration:
            activity.data_ended(self._batches)
            self._compare("end", self._batches, self._digest)
            raise
        self._digest = batch.digest
        self._batches += 1
        if self._batches == 1:
            self._compare("first", batch.size, batch.digest)
        return batch.tree

    def _compare(self, moment: str, number: int | None, digest: int) -> None:
        if self._agree is None:
            return
        seen = self._agree((moment, number, digest))
        if all(one == seen[0] for one in seen):
            return
        self._reader.close()
        self._agree = None
        lines = "; ".join(f"replica {replica_id} {_describe(*one)}" for replica_id, one in enumerate(seen))
        raise StructureError(
            f"Replicas read different data: {lines}. Each must read the same global batches in the same order: use "
            "the same seed for shuffling on all replicas, and do not select files or examples by rank."
        )


def _describe(moment: str, number: int | None, digest: int) -> str:
    drawn = f" (examples {digest:08x})" if digest else ""
    if moment == "end":
        return f"ended after {number} batches{drawn}"
    return f"has a first batch of {number} examples{drawn}"


class _NextBatch(NamedTuple):
    """A replica's report of its next batch.

    Attributes:
        pipeline: The pipeline that it reads.
        moment: "batch", "end", or "error".
        size: The number of examples in the pipeline's elements for this step; None if they cannot be counted.
        digest: A digest of the indices so far.
        knows: Whether the replica has had a batch, so that it can make empty ones.
        text: The error.
    """

    pipeline: int
    moment: str
    size: int | None = 0
    digest: int = 0
    knows: bool = True
    text: str = ""


class OwnData:
    """An iteration of replicas that read their own pipelines."""

    def __init__(self, reader: Reader, place: ReplicaInput, placement: BatchPlacement, agree: Agree) -> None:
        assert place.turns is not None
        self._reader = reader
        self._place = place
        self._pipeline = place.turns.pipeline
        self._placement = placement
        self._agree = agree
        self._ended = False
        self._empty: tuple[Any] | None = None

    def next(self) -> Any:
        """Return this replica's part of the next global batch. Raise StopIteration once every pipeline has ended.

        All replicas call it together. If reading raises on one of them, the others raise a ProgramError.
        """
        batch, error = None, None
        report = _NextBatch(pipeline=self._pipeline, moment="end", knows=self._empty is not None)
        if not self._ended:
            try:
                batch = self._reader.read()
                report = _NextBatch(pipeline=self._pipeline, moment="batch", size=batch.size, digest=batch.digest)
                if self._empty is None:
                    self._empty = (map_parts(batch.tree, self._empty_leaf),)
            except StopIteration:
                self._ended = True
            except Exception as failure:  # noqa: BLE001 - raised once the others know of it
                error = failure
                report = _NextBatch(
                    pipeline=self._pipeline, moment="error", text=f"{type(failure).__name__}: {failure}"
                )
        seen = [_NextBatch._make(one) for one in self._agree(tuple(report))]
        if error is not None:
            raise error
        self._check(seen)
        if all(one.moment == "end" for one in seen):
            raise StopIteration
        if not all(one.knows for one in seen):
            self._share_structure()
        sizes = {one.pipeline: one.size for one in seen}
        known = [size for size in sizes.values() if size is not None]
        return self._with_size(batch, sum(known) if len(known) == len(sizes) else None)

    def _check(self, seen: Sequence[_NextBatch]) -> None:
        failed = [f"replica {replica}: {one.text}" for replica, one in enumerate(seen) if one.moment == "error"]
        if failed:
            raise ProgramError(
                f"Another replica could not read its next batch ({'; '.join(failed)}), so there is no global batch. "
                "The error is that replica's own."
            )
        first: dict[int, tuple[int, _NextBatch]] = {}
        for replica, one in enumerate(seen):
            other, same = first.setdefault(one.pipeline, (replica, one))
            if one[1:4] != same[1:4]:
                raise StructureError(
                    f"Replicas of one input pipeline read different data: replica {other} has {_shown(same)}; replica "
                    f"{replica} has {_shown(one)}. Each replica makes its worker's pipeline itself: use the "
                    "same seed for shuffling, and do not select files or examples by rank."
                )

    def _share_structure(self) -> None:
        """Send the structure of a batch, or receive it from a replica whose pipeline is not empty."""

        def sent(component: Any) -> Any:
            return self._wrapped(component.cpu() if isinstance(component, torch.Tensor) else component, 0)

        def received(leaf: Any) -> Any:
            return None if leaf is None else self._wrapped(self._placement.carry(leaf.values[0], False), 0)

        examples = self._agree(None if self._empty is None else (self._of_leaves(self._empty[0], sent),))
        if self._empty is None:
            [example] = next(one for one in examples if one is not None)
            self._empty = (map_parts(example, received),)

    def _of_leaves(self, tree: Any, change: Callable[[Any], Any]) -> Any:
        def part(leaf: Any) -> Any:
            return change(leaf.component(self._place.replica_id)) if isinstance(leaf, PerReplica) else leaf

        return map_parts(tree, part)

    def _empty_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        component = leaf.component(self._place.replica_id)
        if leaf.global_batch_size is not None and not may_be_empty(component):
            return leaf  # an error is raised if an empty one is ever needed
        nothing = empty_like(component)
        # A view would keep the whole batch alive.
        return self._wrapped(nothing.clone() if isinstance(nothing, torch.Tensor) else copy.copy(nothing), 0)

    def _with_size(self, batch: Batch | None, size: int | None) -> Any:
        """Return the batch, or an empty one, with the number of examples in the global batch in its leaves."""
        assert self._empty is not None

        def mark(component: Any) -> Any:
            if batch is None and size is not None and not may_be_empty(component):
                raise StructureError(
                    f"The input pipeline of replica {self._place.replica_id} has ended before the others, and the "
                    f"batch's {type(component).__name__} cannot be empty. Make the pipelines equally long, or collate "
                    "into tensors."
                )
            return self._wrapped(component, size)

        return self._of_leaves(self._empty[0] if batch is None else batch.tree, mark)

    def _wrapped(self, component: Any, size: int | None) -> Any:
        return PerReplica.own(self._place.replica_id, component, self._place.num_replicas, size)


def _shown(one: _NextBatch) -> str:
    drawn = f" (examples {one.digest:08x})" if one.digest else ""
    return "no more batches" if one.moment == "end" else f"{one.size} examples for this step{drawn}"
