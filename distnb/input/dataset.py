"""A dataset of global batches on one replica, and one iteration over it."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from distnb import activity
from distnb.errors import ProgramError
from distnb.input.agreeing import Agree, OwnData, SameData
from distnb.input.batch_placement import placement_for
from distnb.input.dealing import ReplicaInput
from distnb.input.draws import Drawing, ReplicaDraws, capture, on_host, restore, set_state, state_of
from distnb.input.optional import AskedIterator
from distnb.input.progress import VERSION, Progress, checked_state, pipelines_of
from distnb.input.reading import Reader
from distnb.input.sources.base import Source
from distnb.input.sources.element_spec import spec_of
from distnb.options import InputOptions

__all__ = ["DistributedDataset", "DistributedIterator", "program_began", "program_failed"]

UNKNOWN_CARDINALITY = -2

_AHEAD = 4  # a message from the notebook for every batch would cost a third of a short step


class DistributedDataset(Iterable[Any]):
    """A dataset of global batches, of which this replica gets its slices; made by `distribute`.

    Iterating yields each batch's structure with `PerReplica` leaves that hold the replica's own component (with one
    replica: the batches themselves, on the device). Iterating again starts again.

    Reading ahead, on the caller's thread: by default as many batches as there are replicas, of iterables and functions
    (generators), and of what workers load or is in memory, whose copies to a GPU are started early. Other data that is
    asked for single examples by this process (`num_workers=0`) is read when it is asked for; with
    `InputOptions(prefetch=k)` k batches ahead. `InputOptions(prefetch=0)` never reads ahead.

    Random numbers: samplers draw from the stream that all replicas share, as in a run on one process. What examples
    draw when they are loaded (augmentation) comes from a stream of the replica's own. Where workers read
    pipelines of their own, each has a stream of its own, which begins with a number of the shared one.

    Going on in the middle of an epoch: `state_dict` and `load_state_dict`.
    """

    def __init__(
        self, source: Source, place: ReplicaInput, options: InputOptions, drawing: Drawing, agree: Agree | None
    ) -> None:
        self._source = source
        self._place = place
        self._options = options
        self._drawing = drawing
        self._agree = agree if place.num_replicas > 1 else None
        self._end_previous: Callable[[], None] | None = None
        self._progress: Progress | None = None
        self._resume: dict[str, Any] | None = None
        self._spec: Any = None

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        # What stands in a notebook for the engines' dataset is one, too.
        return True if getattr(other, "is_distributed_dataset", False) else NotImplemented

    def __iter__(self) -> DistributedIterator:
        if self._end_previous is not None:
            self._end_previous()  # persistent workers serve one iteration at a time
        resume = self._resume
        progress = Progress(self._next_epoch() if resume is None else resume["epoch"])
        loads = self._start(progress, resume)
        batches = self.cardinality
        progress.batches = None if batches == UNKNOWN_CARDINALITY else batches
        self._progress, self._resume = progress, None
        placement = placement_for(self._place.target)
        reader = Reader(loads, self._place, placement, self._depth())
        if resume is not None and resume["position"]:
            reader.fill()  # what was read ahead had been drawn when the state was taken
            restore(self._drawing.shared, resume["random"])
        if self._source.exclusive:
            self._end_previous = loads.close
        if self._agree is not None and self._place.several_pipelines:
            own = OwnData(reader, self._place, placement, self._agree)
            return DistributedIterator(reader, own, progress, 0, self._source.data)
        # What others do meanwhile must not matter: no random numbers are drawn, and none of the user's code runs here.
        depth = self._options.prefetch
        ahead = 0 if not self._source.quiet else _AHEAD if depth is None else min(depth, _AHEAD)
        return DistributedIterator(reader, SameData(reader, self._agree), progress, ahead, self._source.data)

    def _next_epoch(self) -> int:
        last = self._progress
        return 0 if last is None else last.epoch + (last.ended or last.steps > 0)

    def _start(self, progress: Progress, resume: dict[str, Any] | None) -> Any:
        """Begin to read; where an earlier iteration is gone on with, as that one began."""
        skip = 0
        if resume is not None:
            skip = resume["position"]
            restore(self._drawing.shared, resume["began"])
            for generator, state in zip(self._source.generators(), resume["generators"], strict=False):
                set_state(generator, state)
        kept = None if resume is None else resume["kept"]
        progress.before = self._circumstances() | ({} if kept is None else {"kept": kept})
        progress.steps = skip // self._place.elements_per_step
        self._drawing.begin()
        with self._drawing(), on_host(self._place.device):
            return self._source.start(skip, kept)

    def __len__(self) -> int:
        """Number of global batches. Raises TypeError when it is not known."""
        try:
            if self._place.several_pipelines:
                raise TypeError("it depends on what the longest of several input pipelines gives.")
            return -(-self._source.length() // self._place.elements_per_step)
        except (TypeError, NotImplementedError) as error:
            raise TypeError(f"The number of batches of this dataset is not known beforehand: {error}") from None

    @property
    def place(self) -> ReplicaInput:
        """Which replica reads, and which part of each batch is its."""
        return self._place

    @property
    def reads_once(self) -> bool:
        """Whether a second iteration would find nothing, as that of a generator."""
        return isinstance(self._source.data, Iterator)

    @property
    def sizes(self) -> tuple[int, int] | None:
        """How many examples there are, and how many a full global batch has; None where reading alone tells."""
        return self._source.sizes()

    @property
    def cardinality(self) -> int:
        """Number of global batches; -2 (tf.data's UNKNOWN_CARDINALITY) when it is not known beforehand."""
        try:
            return len(self)
        except TypeError:
            return UNKNOWN_CARDINALITY

    @property
    def epoch(self) -> int:
        """The number of the iteration that is under way or, after its end, of the next one; the first is 0."""
        if self._resume is not None:
            return int(self._resume["epoch"])
        progress = self._progress
        return 0 if progress is None else progress.epoch + progress.ended

    @property
    def element_spec(self) -> Any:
        """The structure of a batch with a `TensorSpec` for each leaf; with several replicas, a PerReplica of them.

        It is learned from a first batch, which is loaded for that purpose where the data is not in memory; nothing is
        consumed. The axis of examples has size None, the others are as in that batch.

        Raises:
            ProgramError: The data can be read once only, or is empty.
        """
        if self._spec is None:
            try:
                with ReplicaDraws(0).entered(), on_host(self._place.device):
                    batch = self._source.peek()
            except StopIteration:
                raise ProgramError("This dataset is empty, so what its batches look like is not known.") from None
            self._spec = spec_of(batch, self._place.num_replicas, as_it_is=self._place.takes_whole_batches)
        return self._spec

    def state_dict(self) -> dict[str, Any]:
        """How far reading has come: which epoch, which batch of it, and the random states of its shuffling.

        It is for the latest iteration and the batches that it gave, whatever is read ahead; plain values, the
        same on all replicas (but where workers read data of their own, each has its own). `torch.save` takes it.
        """
        if self._resume is not None:
            return dict(self._resume)
        progress, now = self._progress or Progress(0), self._circumstances()
        under_way = progress.steps > 0 and not progress.ended
        before = progress.before if under_way else now
        return {
            "version": VERSION,
            "epoch": progress.epoch + progress.ended,
            "position": progress.steps * self._place.elements_per_step if under_way else 0,
            "began": before["random"],
            "generators": before["generators"],
            "random": now["random"],
            "kept": before["kept"],
            "pipelines": pipelines_of(self._place),
        }

    def _circumstances(self) -> dict[str, Any]:
        """What decides how the next iteration reads: the states of the streams, and workers that are there already."""
        return {
            "random": capture(self._drawing.shared),
            "generators": [state_of(each) for each in self._source.generators()],
            "kept": self._source.kept(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the next iteration go on where `state_dict` was taken: with exactly the remaining batches.

        The dataset must be made of the same data; the number of replicas may be another one. The global random
        generators are set when that iteration begins, so that the epochs after it are shuffled alike, too. Map-style
        data is not loaded for what is left out; of iterable data the batches are read and dropped. What examples draw
        when they are loaded on several replicas (augmentation) begins anew.

        Raises:
            OptionError: It is no such state, or one of other input pipelines.
        """
        self._resume = checked_state(state_dict, self._place)

    def __repr__(self) -> str:
        try:
            batches = f"{len(self)} global batches"
        except TypeError:
            batches = "global batches"
        return f"<DistributedDataset of {batches} over {self._place.num_replicas} replica(s)>"

    def __reduce__(self) -> Any:
        # A dataset stays where it is. Who looks for what it leads to finds the user's data, and nothing of ours.
        return _stays, (self._source.data, self._place)

    def _depth(self) -> int:
        """How many batches are read ahead."""
        source, depth = self._source, self._options.prefetch
        if depth is not None:
            return depth
        gains = source.iterable or (source.quiet and self._place.target.type == "cuda")
        return self._place.num_replicas if gains else 0


def _stays(*parts: Any) -> Any:
    raise ProgramError(
        "A distributed dataset was to be copied to another process. It stays on its replica: iterate over it there, or "
        "distribute the data it was made from once more."
    )


class DistributedIterator(AskedIterator):
    """One iteration over a distributed dataset. Dropping it ends what reads ahead; `close` does so at once.

    Attributes:
        ahead: How many batches may be read before they are asked for: see `peek`.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return True if getattr(other, "is_distributed_iterator", False) else NotImplemented

    def __init__(
        self,
        reader: Reader,
        batches: SameData | OwnData,
        progress: Progress,
        ahead: int,
        data: Any,
    ) -> None:
        self._reader = reader
        self._batches = batches
        self._progress = progress
        self._open = True
        self._cut_short = False
        self.ahead = ahead
        self._data = data
        self._read_in = _program
        _under_way.add(self)

    def __next__(self) -> Any:
        if not self._open:
            if self._cut_short:
                raise ProgramError(
                    "This iteration ended with the program that failed while it read: the replicas may have read "
                    "different numbers of batches. Start a new one: iterate over the dataset again."
                )
            raise StopIteration
        self._read_in = _program
        activity.begin("input")
        try:
            batch = self._batches.next()
        except StopIteration:
            self._open = False
            self._progress.ended = True
            raise
        except Exception:
            self._progress.steps += 1  # reading may go on behind a bad batch, as with a DataLoader
            raise
        except BaseException:
            self.cut_short()
            raise
        finally:
            activity.end()
        self._progress.gave()
        activity.data_goes_on()
        return batch

    def peek(self, count: int) -> list[Any]:
        """The batches that `next` gives next, up to where it raises; they do not count as given.

        It is for the notebook, and only for as many as `ahead` says.
        """
        if not self._open:
            return []
        self._read_in = _program
        activity.begin("input")
        try:
            return [batch.tree for batch in self._reader.peek(count)]
        except BaseException:
            self.cut_short()
            raise
        finally:
            activity.end()

    def close(self) -> None:
        """End this iteration: later calls of `next` find nothing."""
        self._open = False
        self._reader.close()

    def cut_short(self) -> None:
        """End it with the program that read it: later calls of `next` say so."""
        if self._open:
            self._open, self._cut_short = False, True
            self._reader.cut_short()

    def __reduce__(self) -> Any:
        return _stays, (self._data, id(self))


# -- the programs of this process, which read iterations that are under way --------------------------------------------

_program = 0
_under_way: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()


def program_began() -> None:
    """A program began: what it reads is its own from now on."""
    global _program
    _program += 1


def program_failed() -> None:
    """The program ended half-way: end every iteration that it read, also those that names or tracebacks hold.

    The replicas may have read different numbers of batches.
    """
    for iteration in list(_under_way):
        if iteration._read_in == _program:
            with contextlib.suppress(Exception):  # one that is ending already must not keep the others
                iteration.cut_short()


@atexit.register
def _before_exit() -> None:
    for iteration in list(_under_way):
        with contextlib.suppress(Exception):
            iteration.close()
