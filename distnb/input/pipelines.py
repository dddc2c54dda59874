"""Input pipelines of the workers' own: their readers take elements in turn, and stay in step with all others.

Each pipeline alone knows how large its next batch is, and whether there is one. So the replicas tell each other, in one
small exchange per batch: the global batch is what all pipelines give for one step, a pipeline that has ended gives
empty batches until the last one has, and one that cannot be read is told to all.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distnb.errors import ProgramError, StructureError
from distnb.input.batch_placement import BatchPlacement
from distnb.input.cutting import count_examples, map_parts, slice_bounds
from distnb.input.reading import Batch, may_be_empty, nothing_of
from distnb.input.sources.base import FROM_THE_START, Load, Place, Source, StartingPoint, Turns
from distnb.values.distributed import PerReplica

__all__ = ["Agree", "Together", "TurnsSource"]

Agree = Callable[[Any], Sequence[Any]]
"""Gathers one small value of each replica on all, in replica order."""


class TurnsSource(Source):
    """Of every `takers` successive elements of a source this replica gets one; after an odd end, an empty one.

    Args:
        batches: Loads whole batches.
        turns: Which elements are this replica's.
    """

    def __init__(self, batches: Source, turns: Turns) -> None:
        self._batches = batches
        self._turns = turns
        self.data = batches.data
        self.quiet = batches.quiet
        self.iterable = batches.iterable
        self.exclusive = batches.exclusive

    def start(self, beginning: StartingPoint = FROM_THE_START) -> Iterator[Load]:
        if self._turns.pieces == 1:
            return _Taking(self._batches.start(beginning), self._turns, 0)
        return _Taking(self._batches.start(beginning._replace(skip=0)), self._turns, beginning.skip)

    def length(self) -> int:
        return self._batches.length()

    def peek(self) -> Any:
        return self._batches.peek()

    def kept(self) -> bool:
        return self._batches.kept()

    def generators(self) -> list[Any]:
        return self._batches.generators()


class _Element(NamedTuple):
    """Some examples of a load; `examples` is None for what cannot be counted, which is one element as it is."""

    load: Load
    examples: int | None
    start: int
    stop: int


class _Taking(Iterator[Load]):
    def __init__(self, loads: Iterator[Load], turns: Turns, skip: int) -> None:
        self._loads = loads
        self._turns = turns
        self._ready: deque[_Element] = deque()
        self._group: list[_Element] = []
        if hasattr(loads, "give_up"):
            self.give_up = loads.give_up
        try:
            for _ in range(skip):
                self._next_element()
        except StopIteration:
            pass  # all was left out

    def _next_element(self) -> _Element:
        while not self._ready:
            load = next(self._loads)
            pieces = self._turns.pieces
            try:
                count = count_examples(load.tree) if load.examples is None else load.examples
            except StructureError:
                if pieces > 1:
                    raise
                self._ready.append(_Element(load, None, 0, 1))
                break
            first, last = load.bounds or (0, count)
            for piece in range(pieces):
                start, stop = slice_bounds(last - first, pieces, piece)
                if stop > start or pieces == 1:
                    self._ready.append(_Element(load, count, first + start, first + stop))
        return self._ready.popleft()

    def __next__(self) -> Load:
        # What was taken stays when reading the next one fails: the caller may go on.
        while len(self._group) < self._turns.takers:
            try:
                self._group.append(self._next_element())
            except StopIteration:
                break
        group, self._group = self._group, []
        if not group:
            raise StopIteration
        turn = self._turns.turn
        load, count, start, stop = group[turn] if turn < len(group) else group[0]._replace(stop=group[0].start)
        if any(element.examples is None for element in group):
            return Load(load.tree, bounds=(0, stop - start), whole=True, borrowed=load.borrowed)
        size = sum(element.stop - element.start for element in group)
        whole = self._turns.pieces == 1 and load.bounds is None
        return Load(load.tree, count, (start, stop), size, separate=whole, borrowed=load.borrowed)

    def close(self) -> None:
        """Let the pipeline go."""
        close = getattr(self._loads, "close", None)
        if close is not None:
            close()


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


class Together:
    """One iteration of replicas that read pipelines of their own.

    Args:
        place: This replica.
        placement: How leaves reach its device.
        agree: Gathers one small value of each replica on all.
    """

    def __init__(self, place: Place, placement: BatchPlacement, agree: Agree) -> None:
        assert place.turns is not None
        self._place = place
        self._pipeline = place.turns.pipeline
        self._placement = placement
        self._agree = agree
        self._ended = False
        self._empty: Any = None
        self._knows = False

    def next(self, read: Callable[[], Batch]) -> Any:
        """This replica's part of the next global batch. All replicas call it together.

        Raises:
            StopIteration: Every pipeline has ended.
            Exception: Whatever reading raised here.
            ProgramError: Another replica could not read.
            StructureError: Replicas of one pipeline read different data.
        """
        tree, told, error = None, _NextBatch(self._pipeline, "end", knows=self._knows), None
        if not self._ended:
            try:
                batch = read()
                tree = self._placement.hand_over(batch.made)
                self._learn(tree)
                told = _NextBatch(self._pipeline, "batch", batch.size, batch.digest)
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
            self._ask()
        sizes = {one.pipeline: one.size for one in seen}
        known = [size for size in sizes.values() if size is not None]
        return self._marked(self._empty if tree is None else tree, sum(known) if len(known) == len(sizes) else None)

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

    def _learn(self, tree: Any) -> None:
        if not self._knows:
            self._knows = True
            self._empty = map_parts(tree, self._emptied)

    def _ask(self) -> None:
        """Learn what a batch looks like from a replica whose pipeline is not empty."""

        def sent(leaf: Any) -> Any:
            if leaf is None:
                return None
            component = self._own(leaf)
            return self._wrapped(component.cpu() if isinstance(component, torch.Tensor) else component, 0)

        def received(leaf: Any) -> Any:
            return None if leaf is None else self._wrapped(self._placement.carry(leaf.values[0], False), 0)

        shown = self._agree((self._knows, map_parts(self._empty, sent) if self._knows else None))
        if not self._knows:
            example = next(tree for knows, tree in shown if knows)
            self._knows, self._empty = True, map_parts(example, received)

    def _emptied(self, leaf: Any) -> Any:
        component = self._own(leaf)
        if not isinstance(leaf, PerReplica):
            return leaf
        if leaf.global_batch_size is not None and not may_be_empty(component):
            return leaf  # refused if it is ever needed
        nothing = nothing_of(component)
        # A view would keep the whole batch.
        return self._wrapped(copy.copy(nothing) if not isinstance(nothing, torch.Tensor) else nothing.clone(), 0)

    def _marked(self, tree: Any, size: int | None) -> Any:
        """The batch, whose leaves know how many examples the replicas have of it together."""

        def mark(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica):
                return leaf
            component = self._own(leaf)
            if tree is self._empty and size is not None and not may_be_empty(component):
                raise StructureError(
                    f"The input pipeline of replica {self._place.replica_id} has ended before the others, and the "
                    f"batch's {type(component).__name__} cannot be empty. Make the pipelines equally long, or collate "
                    "into tensors."
                )
            return self._wrapped(component, size)

        return map_parts(tree, mark)

    def _own(self, leaf: Any) -> Any:
        return leaf.component(self._place.replica_id) if isinstance(leaf, PerReplica) else leaf

    def _wrapped(self, component: Any, size: int | None) -> Any:
        return PerReplica.own(self._place.replica_id, component, self._place.num_replicas, size)


def _shown(one: _NextBatch) -> str:
    drawn = f" (examples {one.digest:08x})" if one.digest else ""
    return "no more batches" if one.moment == "end" else f"{one.size} examples for this step{drawn}"
