"""What replicas tell each other while they read: that their batches are the same, or what each pipeline gives.

Where workers read pipelines of their own, each pipeline alone knows how large its next batch is, and whether there is
one. So the replicas tell each other, in one small exchange per batch: the global batch is what all pipelines give for
one step, a pipeline that has ended gives empty batches until the last one has, and one that cannot be read is told to
all.
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
from distnb.input.reading import Batch, Reader, may_be_empty, nothing_of
from distnb.values.distributed import PerReplica

__all__ = ["Agree", "OwnData", "SameData"]

Agree = Callable[[Any], Sequence[Any]]
"""Gathers one small value of each replica on all, in replica order."""


class SameData:
    """One iteration of replicas that read the same global batches; the first one and the end are compared."""

    def __init__(self, reader: Reader, agree: Agree | None) -> None:
        self._reader = reader
        self._agree = agree
        self._batches = 0
        self._digest = 0

    def next(self) -> Any:
        """The replica's part of the next batch. Raises StructureError where replicas read different data."""
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
        lines = "; ".join(f"replica {replica_id} {_told(*one)}" for replica_id, one in enumerate(seen))
        raise StructureError(
            f"Replicas read different data: {lines}. Each must read the same global batches in the same order: seed "
            "whatever shuffles them alike on all replicas, and do not pick files or examples by rank."
        )


def _told(moment: str, number: int | None, digest: int) -> str:
    drawn = f" (examples {digest:08x})" if digest else ""
    if moment == "end":
        return f"ended after {number} batches{drawn}"
    return f"has a first batch of {number} examples{drawn}"


class _NextBatch(NamedTuple):
    """What a replica tells of its next batch.

    Attributes:
        pipeline: Which one it reads.
        moment: "batch", "end", or "error".
        size: Examples that the pipeline gives for this step; None where they cannot be counted.
        digest: Of the indices so far.
        knows: Whether it has had a batch, so that it can make empty ones.
        text: The error.
    """

    pipeline: int
    moment: str
    size: int | None = 0
    digest: int = 0
    knows: bool = True
    text: str = ""


class OwnData:
    """One iteration of replicas that read pipelines of their own."""

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
        """This replica's part of the next global batch; StopIteration once every pipeline has ended.

        All replicas call it together. What reading raises on one of them, the others raise as a ProgramError.
        """
        batch, error = None, None
        told = _NextBatch(self._pipeline, "end", knows=self._empty is not None)
        if not self._ended:
            try:
                batch = self._reader.read()
                told = _NextBatch(self._pipeline, "batch", batch.size, batch.digest)
                if self._empty is None:
                    self._empty = (map_parts(batch.tree, self._emptied),)
            except StopIteration:
                self._ended = True
            except Exception as failure:  # noqa: BLE001 - raised once the others know
                error = failure
                told = _NextBatch(self._pipeline, "error", text=f"{type(failure).__name__}: {failure}")
        seen = [_NextBatch(*one) for one in self._agree(tuple(told))]
        if error is not None:
            raise error
        self._check(seen)
        if all(one.moment == "end" for one in seen):
            raise StopIteration
        if not all(one.knows for one in seen):
            self._learn()
        sizes = {one.pipeline: one.size for one in seen}
        known = [size for size in sizes.values() if size is not None]
        return self._marked(batch, sum(known) if len(known) == len(sizes) else None)

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
                    f"{replica} has {_shown(one)}. Each replica makes its worker's pipeline for itself: seed whatever "
                    "shuffles it alike, and do not pick files or examples by rank."
                )

    def _learn(self) -> None:
        """Tell what a batch looks like, or learn it from a replica whose pipeline is not empty."""

        def sent(component: Any) -> Any:
            return self._wrapped(component.cpu() if isinstance(component, torch.Tensor) else component, 0)

        def received(leaf: Any) -> Any:
            return None if leaf is None else self._wrapped(self._placement.carry(leaf.values[0], False), 0)

        shown = self._agree(None if self._empty is None else (self._of_leaves(self._empty[0], sent),))
        if self._empty is None:
            [example] = next(one for one in shown if one is not None)
            self._empty = (map_parts(example, received),)

    def _of_leaves(self, tree: Any, change: Callable[[Any], Any]) -> Any:
        def part(leaf: Any) -> Any:
            return change(leaf.component(self._place.replica_id)) if isinstance(leaf, PerReplica) else leaf

        return map_parts(tree, part)

    def _emptied(self, leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        component = leaf.component(self._place.replica_id)
        if leaf.global_batch_size is not None and not may_be_empty(component):
            return leaf  # refused if it is ever needed
        nothing = nothing_of(component)
        # A view would keep the whole batch.
        return self._wrapped(nothing.clone() if isinstance(nothing, torch.Tensor) else copy.copy(nothing), 0)

    def _marked(self, batch: Batch | None, size: int | None) -> Any:
        """The batch, or an empty one, whose leaves know how many examples the replicas have of it together."""
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
