"""A dataset of global batches on one replica, and its iterations."""

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from distnb import activity
from distnb.errors import ProgramError
from distnb.input.agreeing import Agree, OwnData, SameData
from distnb.input.batch_placement import placement_for
from distnb.input.dealing import ReplicaInput
from distnb.input.draws import Drawing, ReplicaDraws, capture, on_host, restore
from distnb.input.optional import BatchIterator
from distnb.input.progress import VERSION, Progress, checked_state, pipelines_of
from distnb.input.reading import Reader
from distnb.input.sources.base import Source
from distnb.input.sources.element_spec import spec_of
from distnb.objects.rng_state import generator_state, set_generator_state
from distnb.options import InputOptions
from distnb.values.structure import flatten, select

__all__ = [
    "Dealing",
    "Dealt",
    "DistributedDataset",
    "DistributedIterator",
    "program_began",
    "program_failed",
    "sent_to_new_replicas",
]

_logger = logging.getLogger("distnb.input")

UNKNOWN_CARDINALITY = -2

_AHEAD_NBYTES = 8 << 20  # of the batches that the notebook fetches ahead


class Dealt(NamedTuple):
    """Data as it is dealt to this replica.

    Attributes:
        agree: Gathers one small value of each replica on all; None for a single replica.
    """

    source: Source
    place: ReplicaInput
    drawing: Drawing
    agree: Agree | None


class Dealing(ABC):
    """The way in which data is dealt to the replicas. It is pickled for new replicas.

    Attributes:
        data: The data that the user distributed.
        options: The input options.
    """

    data: Any
    options: InputOptions

    @abstractmethod
    def replicas(self) -> tuple[int, int]:
        """Return the current number of replicas, and the number of this one."""

    @abstractmethod
    def deal(self) -> Dealt:
        """Deal the data to the current replicas."""


class BatchReading(NamedTuple):
    """An iteration in progress.

    Attributes:
        place: The replica for which it reads.
        batches: Its batches, of which `reader` reads this replica's part.
        ahead: The number of batches that may be read before they are requested.
    """

    place: ReplicaInput
    reader: Reader
    batches: SameData | OwnData
    ahead: int


class DistributedDataset(Iterable[Any]):
    """A dataset of global batches, of which this replica gets its slices. `distribute` makes it.

    An iteration yields each batch's structure with `PerReplica` leaves that hold the replica's own component (with one
    replica: the batches themselves, on the device). A second iteration starts from the beginning.

    Reading ahead happens on the caller's thread. By default the dataset reads as many batches ahead as there are
    replicas, if the data is an iterable or a function (generator), or if workers load it or it is in memory and its
    copies to a GPU can start early. Other data, whose examples this process loads itself (`num_workers=0`), is read on
    request. `InputOptions(prefetch=k)` reads k batches ahead, and `InputOptions(prefetch=0)` never reads ahead.

    Random numbers: samplers draw from the stream that all replicas share, as in a run on one process. Examples that
    draw while they are loaded (augmentation) use the replica's own stream. If workers read their own pipelines, each
    pipeline has its own stream, which is seeded with a number of the shared one.

    To resume in the middle of an epoch, use `state_dict` and `load_state_dict`.
    """

    def __init__(self, dealing: Dealing, dealt: Dealt | None = None) -> None:
        self._dealing = dealing
        self._dealt = dealt
        self._end_previous: Callable[[], None] | None = None
        self._progress: Progress | None = None
        self._resume: dict[str, Any] | None = None
        self._spec: Any = None
        self._is_outdated = False

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        # The notebook's representative of the engines' dataset counts, too.
        return True if getattr(other, "is_distributed_dataset", False) else NotImplemented

    def now(self) -> Dealt:
        """Return the data as it is dealt to the current replicas. It is dealt again after they have changed.

        Raises:
            ProgramError: They have changed, and this data cannot be dealt again.
        """
        dealt, dealing = self._dealt, self._dealing
        if dealt is not None:
            place = dealt.place
            if not self._is_outdated and (place.num_replicas, place.replica_id) == dealing.replicas():
                return dealt
            self._check_dealt_again(place)
        if self._end_previous is not None:
            self._end_previous()
        self._dealt = dealt = dealing.deal()
        self._end_previous, self._spec, self._is_outdated = None, None, False
        return dealt

    def deal_again(self) -> None:
        """Deal the data again when it is next used, because some of the replicas are new. All others call this, too."""
        self._is_outdated = True

    def _check_dealt_again(self, place: ReplicaInput) -> None:
        replicas, _ = self._dealing.replicas()
        changed = f"The replicas that read this dataset have changed: there were {place.num_replicas}, now {replicas}."
        if place.several_pipelines:
            raise ProgramError(
                f"{changed} Each read an input pipeline with data of its own, which cannot be dealt to other replicas. "
                "Distribute the data again."
            )
        if self.reads_once and self._progress is not None:
            raise ProgramError(
                f"{changed} Its data is a {type(self._dealing.data).__name__}, which can be read only once, and was "
                "read before. Distribute something that can be read again, such as the function that makes the "
                "generator."
            )

    def __iter__(self) -> DistributedIterator:
        self.now()
        if self._end_previous is not None:
            self._end_previous()  # persistent workers serve one iteration at a time
        resume = self._resume
        progress = Progress(epoch=self._next_epoch() if resume is None else resume["epoch"])
        reading = self.read(progress, resume)
        self._progress, self._resume = progress, None
        return DistributedIterator(self, progress, reading)

    def read(self, progress: Progress, resume: dict[str, Any] | None) -> BatchReading:
        """Begin to read, or resume from a state of `state_dict`. `progress` is that of the iteration."""
        dealt = self.now()
        source, place, agree = dealt.source, dealt.place, dealt.agree
        loads = self._start(progress, resume)
        batches = self.cardinality
        progress.batches = None if batches == UNKNOWN_CARDINALITY else batches
        placement = placement_for(place.target)
        reader = Reader(loads, place, placement, self._depth())
        _logger.debug("epoch %d begins at batch %d, %d batches ahead", progress.epoch, progress.steps, self._depth())
        if resume is not None and resume["position"]:
            reader.fill()  # the saved state includes the draws of the batches that had been read ahead
            restore(dealt.drawing.shared, resume["random"])
        if source.exclusive:
            self._end_previous = loads.close
        if agree is not None and place.several_pipelines:
            return BatchReading(place, reader, OwnData(reader, place, placement, agree), 0)
        depth = self._dealing.options.prefetch
        ahead = source.ahead if depth is None else min(depth, source.ahead)
        return BatchReading(place, reader, SameData(reader, agree), ahead)

    def read_on(self, progress: Progress) -> BatchReading:
        """Continue an iteration where it was when the number of replicas changed. All replicas call this together."""
        shared, before = self.now().drawing.shared, progress.before
        random = capture(shared)
        resume = {
            "position": progress.elements,
            "began": before["random"],
            "generators": before["generators"],
            "random": random,
            "kept": before["kept"],
        }
        reading = self.read(progress, resume)
        restore(shared, random)
        return reading

    def _next_epoch(self) -> int:
        last = self._progress
        return 0 if last is None else last.epoch + (last.ended or last.steps > 0)

    def _start(self, progress: Progress, resume: dict[str, Any] | None) -> Any:
        """Start to read. To resume an earlier iteration, restore the states with which it started."""
        dealt = self.now()
        source, place, drawing = dealt.source, dealt.place, dealt.drawing
        skip = 0
        if resume is not None:
            skip = resume["position"]
            restore(drawing.shared, resume["began"])
            for generator, state in zip(source.generators(), resume["generators"], strict=False):
                set_generator_state(generator, state)
        kept = None if resume is None else resume["kept"]
        progress.before = self._circumstances() | ({} if kept is None else {"kept": kept})
        progress.elements, progress.steps = skip, skip // place.elements_per_step
        drawing.begin()
        with drawing(), on_host(place.device):
            return source.start(skip, kept)

    def __len__(self) -> int:
        """Return the number of global batches. Raise TypeError if it is unknown."""
        source, place = self.now()[:2]
        try:
            if place.several_pipelines:
                raise TypeError("it depends on the longest of several input pipelines.")
            return -(-source.length() // place.elements_per_step)
        except (TypeError, NotImplementedError) as error:
            raise TypeError(f"The number of batches of this dataset is not known beforehand: {error}") from None

    @property
    def place(self) -> ReplicaInput:
        """The replica that reads, and its part of each batch."""
        return self.now().place

    @property
    def reads_once(self) -> bool:
        """True if a second iteration would be empty, as for a generator."""
        return isinstance(self._dealing.data, Iterator)

    @property
    def sizes(self) -> tuple[int, int] | None:
        """The number of examples, and of those in a full global batch; None if they are unknown before reading."""
        return self.now().source.sizes()

    @property
    def cardinality(self) -> int:
        """The number of global batches; -2 (tf.data's UNKNOWN_CARDINALITY) if it is unknown beforehand."""
        try:
            return len(self)
        except TypeError:
            return UNKNOWN_CARDINALITY

    @property
    def epoch(self) -> int:
        """The number of the running iteration or, after its end, of the next one; the first is 0."""
        if self._resume is not None:
            return int(self._resume["epoch"])
        progress = self._progress
        return 0 if progress is None else progress.epoch + progress.ended

    @property
    def element_spec(self) -> Any:
        """The structure of a batch with a `TensorSpec` for each leaf; with several replicas, a PerReplica of them.

        It is derived from a first batch, which is loaded for that purpose if the data is not in memory. Nothing is
        consumed. The axis of examples has size None; the other axes are as in that batch.

        Raises:
            ProgramError: The data can be read only once, or is empty.
        """
        source, place = self.now()[:2]
        if self._spec is None:
            try:
                with ReplicaDraws(0).entered(), on_host(place.device):
                    batch = source.peek()
            except StopIteration:
                raise ProgramError("This dataset is empty, so the structure of its batches is unknown.") from None
            self._spec = spec_of(batch, place.num_replicas, as_it_is=place.takes_whole_batches)
        return self._spec

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of reading: the epoch, the batch, and the random states of its shuffling.

        The state describes the latest iteration and the batches that it returned, regardless of read-ahead. It consists
        of plain values, the same on all replicas (unless workers read their own data: then each worker has its own
        state). `torch.save` accepts it.
        """
        if self._resume is not None:
            return dict(self._resume)
        progress, now = self._progress or Progress(epoch=0), self._circumstances()
        resumable = progress.elements > 0 and not progress.ended
        before = progress.before if resumable else now
        return {
            "version": VERSION,
            "epoch": progress.epoch + progress.ended,
            "position": progress.elements if resumable else 0,
            "began": before["random"],
            "generators": before["generators"],
            "random": now["random"],
            "kept": before["kept"],
            "pipelines": pipelines_of(self.place),
        }

    def _circumstances(self) -> dict[str, Any]:
        """Return the state that determines the next iteration: random streams, and whether workers are running."""
        source, _, drawing, _ = self.now()
        return {
            "random": capture(drawing.shared),
            "generators": [generator_state(each) for each in source.generators()],
            "kept": source.kept(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration resume where `state_dict` was called, with exactly the remaining batches.

        The dataset must be made of the same data; the number of replicas may differ. The global random generators are
        set when that iteration starts, so that later epochs are shuffled the same way, too. Skipped map-style data is
        not loaded; skipped batches of iterable data are read and dropped. The streams from which examples draw while
        they are loaded on several replicas (augmentation) start again.

        Raises:
            OptionError: The argument is not such a state, or belongs to other input pipelines.
        """
        self._resume = checked_state(state_dict, self.place)

    def __repr__(self) -> str:
        try:
            batches = f"{len(self)} global batches"
        except TypeError:
            batches = "global batches"
        return f"<DistributedDataset of {batches} over {self.place.num_replicas} replica(s)>"

    def __reduce__(self) -> Any:
        # A dataset stays on its replica. A search for the objects that it leads to finds only the user's data.
        if not _sending:
            return _refuse_opening, (self._dealing.data, id(self))
        if self.reads_once:
            raise ProgramError(
                f"A new replica cannot read this dataset, whose data is a {type(self._dealing.data).__name__} that can "
                "be read only once."
            )
        return _opened, (self._dealing, self._progress, self._resume)

    def _depth(self) -> int:
        """Return the number of batches to read ahead."""
        source, place = self.now()[:2]
        depth = self._dealing.options.prefetch
        if depth is not None:
            return depth
        gains = source.iterable or (source.ahead > 0 and place.target.type == "cuda")
        return place.num_replicas if gains else 0


def _refuse_opening(*parts: Any) -> Any:
    raise ProgramError(
        "A distributed dataset cannot be copied to another process. Iterate over it on its replica, or distribute the "
        "original data again."
    )


# -- datasets for new replicas -----------------------------------------------------------------------------------------

_sending = False


@contextlib.contextmanager
def sent_to_new_replicas() -> Iterator[None]:
    """Return a context in which datasets and their iterations can be pickled, for the new replicas of their strategy.

    There they continue where the replica that pickled them was.
    """
    global _sending
    _sending = True
    try:
        yield
    finally:
        _sending = False


def _opened(dealing: Dealing, progress: Progress | None, resume: dict[str, Any] | None) -> DistributedDataset:
    dataset = DistributedDataset(dealing)
    dataset._progress, dataset._resume = progress, resume
    return dataset


class DistributedIterator(BatchIterator):
    """An iteration over a distributed dataset. Deleting it ends the read-ahead; `close` does so immediately."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return True if getattr(other, "is_distributed_iterator", False) else NotImplemented

    def __init__(self, dataset: DistributedDataset, progress: Progress, reading: BatchReading | None = None) -> None:
        self._dataset = dataset
        self._progress = progress
        self._reading = reading
        self._open = not progress.ended
        self._cut_short = False
        self._read_in = _program
        _under_way.add(self)

    def _now(self) -> BatchReading:
        """Return what reads for the current replicas. After their number has changed, all of them resume together."""
        reading = self._reading
        place = self._dataset.now().place
        if reading is None or reading.place is not place:
            if reading is not None:
                reading.reader.close()
            self._reading = reading = self._dataset.read_on(self._progress)
        return reading

    @property
    def ahead(self) -> int:
        """The number of batches that may be read before they are requested: see `peek`."""
        return self._now().ahead if self._open else 0

    def ahead_like(self, batch: Any) -> int:
        """Return the number of batches of this one's size that may be read before they are requested."""
        own = select(batch, self._now().place.replica_id)
        nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in flatten(own)[0])
        return min(self.ahead, max(1, _AHEAD_NBYTES // max(1, nbytes)))

    def __next__(self) -> Any:
        if not self._open:
            if self._cut_short:
                raise ProgramError(
                    "This iteration ended with the program that failed while it read: the replicas may have read "
                    "different numbers of batches. Start a new one: iterate over the dataset again."
                )
            raise StopIteration
        self._read_in = _program
        reading = self._now()
        activity.begin("input")
        try:
            batch = reading.batches.next()
        except StopIteration:
            self._open = False
            self._progress.ended = True
            raise
        except Exception:
            # Reading may continue after a bad batch, as with a DataLoader.
            self._progress.skip_batch(reading.place.elements_per_step)
            raise
        except BaseException:
            self.cut_short()
            raise
        finally:
            activity.end()
        self._progress.count_batch(reading.place.elements_per_step)
        activity.data_goes_on()
        return batch

    def peek(self, count: int) -> list[Any]:
        """Return the next batches, up to where `next` would raise. They do not count as returned.

        Only the notebook calls this, for at most `ahead` batches.
        """
        if not self._open:
            return []
        self._read_in = _program
        reading = self._now()
        activity.begin("input")
        try:
            return [batch.tree for batch in reading.reader.peek(count)]
        except BaseException:
            self.cut_short()
            raise
        finally:
            activity.end()

    def deal_again(self) -> None:
        """Resume when a batch is next read, because some of the replicas are new. All others call this, too."""
        self._dataset.deal_again()

    def close(self) -> None:
        """End this iteration. Later calls of `next` raise StopIteration."""
        self._open = False
        if self._reading is not None:
            self._reading.reader.close()

    def cut_short(self) -> None:
        """End this iteration together with the failed program that read it. Later calls of `next` raise an error."""
        if self._open:
            self._open, self._cut_short = False, True
            if self._reading is not None:
                self._reading.reader.cut_short()

    def __reduce__(self) -> Any:
        if not (_sending and self._open):
            return _refuse_opening, (self._dataset._dealing.data, id(self))
        return DistributedIterator, (self._dataset, self._progress)


# -- iterations that the programs of this process read ---------------------------------------------------------------

_program = 0
_under_way: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()


def program_began() -> None:
    """Record that a program started; iterations that it reads belong to it."""
    global _program
    _program += 1


def program_failed() -> None:
    """End every iteration that the failed program read, including iterations that names or tracebacks still hold.

    The replicas may have read different numbers of batches.
    """
    for iteration in list(_under_way):
        if iteration._read_in == _program:
            # An iteration that is already ending must not prevent the end of the others.
            with contextlib.suppress(Exception):
                iteration.cut_short()


@atexit.register
def _before_exit() -> None:
    for iteration in list(_under_way):
        with contextlib.suppress(Exception):
            iteration.close()
