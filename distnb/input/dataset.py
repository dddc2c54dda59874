"""A dataset of global batches on one replica, and one iteration over it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from distnb.errors import ProgramError, StructureError
from distnb.input import iterations
from distnb.input.base import Place, Shared, Source
from distnb.input.draws import on_host
from distnb.input.placement import placement_for
from distnb.input.reading import AheadReader, DirectReader, Maker, Reader, ThreadReader, join_all
from distnb.options import InputOptions

__all__ = ["Agree", "DistributedDataset", "DistributedIterator"]

_EXIT_GRACE_S = 3.0

Agree = Callable[[Any], Sequence[Any]]
"""Gathers one small value of each replica on all, in replica order."""


class DistributedDataset(Iterable[Any]):
    """A dataset of global batches, of which this replica gets its slices; made by `distribute`.

    Iterating yields each batch's structure with `PerReplica` leaves that hold the replica's own component (with one
    replica: the batches themselves, on the device). Iterating again starts again.

    Reading ahead: by default as many batches as there are replicas, where that changes no random number: on a thread
    for loaders with workers, and, for tensors in memory, by starting their copies to a GPU early. A dataset that this
    process reads itself (`num_workers=0`) may draw from the global generators in `__getitem__`, which another thread's
    drawing would disturb, so it is read when it is asked for; `InputOptions(prefetch=k)` reads it k batches ahead on
    the caller's thread. `InputOptions(prefetch=0)` never reads ahead.

    Random numbers: samplers draw from the stream that all replicas share, as in a run on one process. What examples
    draw when they are loaded (augmentation) comes from a stream of the replica's own, as it would in `run`.
    """

    def __init__(
        self, source: Source, place: Place, options: InputOptions, shared: Shared, agree: Agree | None
    ) -> None:
        self._source = source
        self._place = place
        self._options = options
        self._shared = shared
        self._agree = agree if place.num_replicas > 1 else None
        self._end_previous: Callable[[], None] | None = None

    def __iter__(self) -> DistributedIterator:
        if self._end_previous is not None:
            self._end_previous()  # persistent workers serve one iteration at a time
        with self._shared(), on_host(self._place.device):
            loads = self._source.start()
        placement = placement_for(self._place.device)
        reader = self._reader(Maker(loads, self._place, placement))
        if self._source.exclusive:
            self._end_previous = reader.ending()
        return DistributedIterator(reader, placement.hand_over, self._agree)

    def __len__(self) -> int:
        """Number of global batches. Raises TypeError when it is not known."""
        try:
            return self._source.length()
        except (TypeError, NotImplementedError) as error:
            raise TypeError(f"The number of batches of this dataset is not known beforehand: {error}") from None

    def __repr__(self) -> str:
        try:
            batches = f"{len(self)} global batches"
        except TypeError:
            batches = "global batches"
        return f"<DistributedDataset of {batches} over {self._place.num_replicas} replica(s)>"

    def _reader(self, maker: Maker) -> Reader:
        source, depth = self._source, self._options.prefetch
        if depth is None:
            gains = source.threadable or (source.in_memory and self._place.device.type == "cuda")
            depth = self._place.num_replicas if gains else 0
        if depth == 0:
            return DirectReader(maker)
        if source.threadable:
            return ThreadReader(maker, depth, persistent=source.exclusive)
        return AheadReader(maker, depth)


class DistributedIterator(Iterator[Any]):
    """One iteration over a distributed dataset. Dropping it ends what reads ahead; `close` does so at once."""

    def __init__(self, reader: Reader, hand_over: Callable[[Any], Any], agree: Agree | None) -> None:
        self._reader = reader
        self._hand_over = hand_over
        self._agree = agree
        self._batches = 0
        self._digest = 0
        self._open = True
        self._cut_short = False
        self.read_in = iterations.serial
        iterations.note(self)

    def __next__(self) -> Any:
        if not self._open:
            if self._cut_short:
                raise ProgramError(
                    "This iteration ended with the program that failed while it read: the replicas may have read "
                    "different numbers of batches. Start a new one: iterate over the dataset again."
                )
            raise StopIteration
        self.read_in = iterations.serial
        try:
            batch = self._reader.read()
        except StopIteration:
            self._open = False
            self._compare("end", self._batches, self._digest)
            raise
        except Exception:
            raise  # reading may go on behind a bad batch, as with a DataLoader
        except BaseException:
            self.cut_short()
            raise
        self._digest = batch.digest
        self._batches += 1
        if self._batches == 1:
            self._compare("first", batch.size, batch.digest)
        return self._hand_over(batch.made)

    def close(self) -> None:
        """End this iteration: later calls of `next` find nothing."""
        self._open = False
        self._reader.close()

    def cut_short(self) -> None:
        """End it with the program that read it: later calls of `next` say so."""
        if self._open:
            self._open, self._cut_short = False, True
            self._reader.cut_short()

    def _compare(self, moment: str, number: int, digest: int) -> None:
        if self._agree is None:
            return
        seen = self._agree((moment, number, digest))
        if all(one == seen[0] for one in seen):
            return
        self.close()
        lines = "; ".join(f"replica {replica_id} {_told(one)}" for replica_id, one in enumerate(seen))
        raise StructureError(
            f"Replicas read different data: {lines}. Each must read the same global batches in the same order: seed "
            "whatever shuffles them alike on all replicas, and do not pick files or examples by rank."
        )


def _told(seen: tuple[str, int, int]) -> str:
    moment, number, digest = seen
    drawn = f" (examples {digest:08x})" if digest else ""
    if moment == "end":
        return f"ended after {number} batches{drawn}"
    return f"has a first batch of {number} examples{drawn}"


@atexit.register
def _before_exit() -> None:
    iterations.end_all()
    join_all(_EXIT_GRACE_S)
