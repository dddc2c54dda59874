"""Frozen option types and enumerations, importable without torch."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal, Self

from distnb.errors import OptionError, UnknownNameError

__all__ = [
    "DATA_LIMIT_NBYTES",
    "AutoShardPolicy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "ReduceOp",
    "RunOptions",
    "StrategySpec",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
    "nbytes_of",
    "seconds_of",
]


class _Named(enum.Enum):
    """Enumeration whose members users may also give as strings, in any case."""

    @classmethod
    def parse(cls, name: Self | str) -> Self:
        """Return the member that a user named.

        Raises:
            OptionError: No member has that name; the message lists the members. (It is a ValueError.)
        """
        if isinstance(name, cls):
            return name
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        given = repr(name) if name is None or isinstance(name, str | int | float) else f"a {type(name).__name__}"
        article = "an" if cls.__name__.startswith("A") else "a"
        raise OptionError(
            f"{given} is not {article} {cls.__name__}. Choose from {', '.join(repr(each.name) for each in cls)}, as "
            f"strings or as members of distnb.{cls.__name__}."
        )


class ReduceOp(_Named):
    """Operation that combines the values of several replicas into one."""

    SUM = "SUM"
    MEAN = "MEAN"


class VariableSynchronization(_Named):
    """Moment at which the replicas' components of a variable are combined."""

    AUTO = "AUTO"
    """The same as ON_WRITE."""
    NONE = "NONE"
    """Never. Refused, because a plain tensor does that."""
    ON_WRITE = "ON_WRITE"
    """At each assignment: all replicas hold the same value."""
    ON_READ = "ON_READ"
    """When the variable is read outside replicas: each replica assigns to and reads its own component."""


class VariableAggregation(_Named):
    """Operation that combines the replicas' components of a variable into one value."""

    NONE = "NONE"
    """None: code that needs an aggregate raises an error."""
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
    """The component of replica 0, counted over the replicas of all machines."""


DATA_LIMIT_NBYTES = 64_000_000
"""Default size above which data stays on the engines."""

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate(_UNITS) if power}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?i?)B?")


def nbytes_of(size: int | str) -> int:
    """Return a size in bytes, given as a number or as text.

    Raises:
        OptionError: The argument is not a size. (It is a ValueError.)

    Example:
        >>> nbytes_of("1.5 GB")
        1500000000
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None or found[2] not in _UNITS:
        raise OptionError(
            f"{size!r} is not a size. Give a number of bytes, or text such as '64 MB', '2GB' or '512MiB'."
        )
    return int(float(found[1]) * _UNITS[found[2]])


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([smhd]?)")


def seconds_of(duration: float | str) -> float:
    """Return a duration in seconds, given as a number of seconds or as text.

    Raises:
        OptionError: The argument is not a duration. (It is a ValueError.)

    Example:
        >>> seconds_of("20m")
        1200.0
    """
    text = str(duration).strip() if isinstance(duration, int | float | str) and not isinstance(duration, bool) else ""
    found = _DURATION.fullmatch(text)
    if found is None or not float(found[1]):
        raise OptionError(
            f"{duration!r} is not a duration. Give a number of seconds, or text such as '90s', '20m' or '2h'."
        )
    return float(found[1]) * _SECONDS[found[2]]


@dataclass(frozen=True)
class RunOptions:
    """Options of a `Strategy.run` that is called from the notebook.

    Attributes:
        wait: Wait until every replica has reported structure and status (never the tensors). With False the
            calls are pipelined: `run` returns a `Future` at once, and an error is raised by its `result()`, or at the
            end of the cell.
    """

    wait: bool = True


class AutoShardPolicy(_Named):
    """Policy for dividing a dataset among several workers (machines).

    With one worker all policies are the same. Under OFF, FILE and HINT every worker reads its own global batches. Each
    batch is cut into one slice for each replica of all workers, and the worker's replicas take the slices in turn, so a
    step has as many examples as under DATA. Workers that have read everything get empty batches until the last one has.
    """

    OFF = "OFF"
    """Every worker reads the whole dataset. If it is shuffled, each worker has its own order."""
    AUTO = "AUTO"
    """FILE for a dataset that names its files, if it has at least as many files as there are workers; otherwise DATA.
    """
    FILE = "FILE"
    """Each worker reads every n-th file. The dataset has the attribute `files`, a sequence, and the method
    `with_files(files)`, which returns a dataset of the same kind that reads these files only.
    """
    DATA = "DATA"
    """The replicas read their slices of the same global batches. The numbers equal those of one replica."""
    HINT = "HINT"
    """Each worker reads what the dataset's own method `shard(num_workers, worker_index)` returns."""


class InputReplicationMode(_Named):
    """Number of input pipelines that `distribute_datasets_from_function` makes."""

    PER_WORKER = "PER_WORKER"
    """One pipeline for each worker. The worker's replicas take its batches in turn."""
    PER_REPLICA = "PER_REPLICA"
    """One pipeline for each replica."""


_PREFIX = "experimental_"


@dataclass(frozen=True)
class InputOptions:
    """Options of a distributed dataset. tf.distribute's names, with `experimental_`, are accepted too.

    Attributes:
        fetch_to_device: Copy batches to the replica's device. With False they stay in host memory.
        replication_mode: An `InputReplicationMode` or its name.
        place_dataset_on_device: Only False: datasets run on the host.
        per_replica_buffer_size: tf.distribute's name of `prefetch`.
        prefetch: The number of batches to read ahead per replica; 0 for none. None means one per replica if the data is
            read sequentially or copied early to a GPU.
        collate: The examples that a DataLoader's own `collate_fn` receives on each replica. "slice": those of the
            replica's slice. "global": those of the whole global batch, from which the slice is then cut. "auto": the
            slice for torch's own function, else the whole batch, since padding and mixing depend on it.
        auto_shard_policy: An `AutoShardPolicy` or its name.

    Raises:
        OptionError: An option is malformed or cannot be honoured.
    """

    fetch_to_device: bool = True
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    place_dataset_on_device: bool = False
    per_replica_buffer_size: int | None = None
    _: KW_ONLY
    prefetch: int | None = None
    collate: Literal["auto", "slice", "global"] = "auto"
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.fetch_to_device, bool):
            raise OptionError(f"fetch_to_device={self.fetch_to_device!r}: give True or False.")
        if self.place_dataset_on_device:
            raise OptionError(
                f"place_dataset_on_device={self.place_dataset_on_device!r} cannot be honoured: datasets run on the "
                "host, and their batches are brought to the replica's device ahead of time (fetch_to_device=True). "
                "Leave it out; a dataset that shall compute on a device can make its tensors there (device=…)."
            )
        if self.per_replica_buffer_size is not None and self.prefetch is not None:
            raise OptionError(
                f"per_replica_buffer_size={self.per_replica_buffer_size!r} and prefetch={self.prefetch!r} are two "
                "names of one option. Give one."
            )
        depth = self.prefetch if self.per_replica_buffer_size is None else self.per_replica_buffer_size
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
            raise OptionError(
                f"prefetch={depth!r}: give a whole number of batches, 0 or more, or None for as many as there are "
                "replicas."
            )
        if self.collate not in ("auto", "slice", "global"):
            raise OptionError(f"collate={self.collate!r} is unknown. Give 'auto', 'slice' or 'global'.")
        for name, value in {
            "replication_mode": InputReplicationMode.parse(self.replication_mode),
            "prefetch": depth,
            "per_replica_buffer_size": depth,
            "auto_shard_policy": AutoShardPolicy.parse(self.auto_shard_policy),
        }.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.removeprefix(_PREFIX) in _INPUT_OPTIONS:
            return getattr(self, name.removeprefix(_PREFIX))
        raise UnknownNameError("InputOptions", name, _INPUT_OPTIONS)


_INPUT_OPTIONS = [each.name for each in fields(InputOptions)]


def _accept_prefixes(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def make(self: InputOptions, *args: Any, **options: Any) -> None:
        given = {name.removeprefix(_PREFIX): value for name, value in options.items()}
        if unknown := given.keys() - set(_INPUT_OPTIONS):
            raise OptionError(f"InputOptions has no option {unknown.pop()!r}. There are {', '.join(_INPUT_OPTIONS)}.")
        init(self, *args, **given)

    return make


InputOptions.__init__ = _accept_prefixes(InputOptions.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class InputContext:
    """Description of the input pipeline that a function of `distribute_datasets_from_function` makes.

    Attributes:
        num_input_pipelines: The number of pipelines, one for each worker.
        input_pipeline_id: The index of this pipeline.
        num_replicas_in_sync: The number of replicas of all workers.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples of a global batch that each replica gets.

        Raises:
            OptionError: The batch cannot be divided evenly. (It is a ValueError.)

        Example:
            >>> InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(64)
            32
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise OptionError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync!r}. Choose a multiple, or let distribute_dataset cut global batches, "
                "which need not be one."
            )
        return global_batch_size // self.num_replicas_in_sync


class CommunicationImplementation(_Named):
    """Means by which replicas communicate."""

    AUTO = "AUTO"
    """NCCL if each replica has its own GPU; otherwise shared memory for replicas of one machine; otherwise Gloo's ring.
    """
    RING = "RING"
    """Gloo's ring over sockets. Tensors on GPUs go through host memory."""
    NCCL = "NCCL"
    """NCCL, or an error where it is not available."""


@dataclass(frozen=True)
class CommunicationOptions:
    """Communication options of a MultiWorkerMirroredStrategy, or of one call of all_reduce or all_gather.

    Attributes:
        bytes_per_pack: The size at which a pack of tensors is closed. Gradients, and the tensors of one reduce or
            all_reduce, travel in packs. 0 leaves the size to distnb.
        timeout_seconds: The time that a replica waits in one collective for the others before it raises. None: as long
            as they are alive.
        implementation: A `CommunicationImplementation` or its name.

    Raises:
        OptionError: A negative number, or an unknown name.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        nbytes, limit_s = self.bytes_per_pack, self.timeout_seconds
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise OptionError(f"bytes_per_pack={nbytes!r}: give a whole number of bytes, or 0 to leave it to distnb.")
        if limit_s is not None and (
            isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not 0 < limit_s < float("inf")
        ):
            raise OptionError(f"timeout_seconds={limit_s!r}: give a positive number of seconds, or None for no limit.")
        object.__setattr__(self, "implementation", CommunicationImplementation.parse(self.implementation))

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, updated with each of the other's that is not the default.

        Example:
            >>> CommunicationOptions(bytes_per_pack=5).merge(CommunicationOptions(timeout_seconds=9.0)).bytes_per_pack
            5
        """
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise OptionError(f"merge takes a distnb.CommunicationOptions and got {options!r}.")
        given = {each.name: getattr(options, each.name) for each in fields(options)}
        return replace(self, **{name: value for name, value in given.items() if value != _DEFAULTS[name]})


_DEFAULTS = {each.name: each.default for each in fields(CommunicationOptions)}


@dataclass(frozen=True)
class ValueContext:
    """Description of the replica for which a function of `distribute_values_from_function` makes a value."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True)
class StrategySpec:
    """Full description of a strategy. Equal specs name the same strategy object in every process.

    Attributes:
        kind: The word of the strategy's class in `%%distribute`, such as "mirrored"; "module:Class" for a class
            outside distnb.
        devices: Devices in replica order, as strings; empty for "all that the cluster has".
        num_replicas: The number of replicas in sync; 0 while it is not known.
        options: Sorted (name, value) pairs of hashable options, such as ("gradient_reduction", "mean").
    """

    kind: str
    devices: tuple[str, ...] = ()
    num_replicas: int = 0
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the names of the fields: every program carries a spec, so its pickle is kept small."""
        return StrategySpec, (self.kind, self.devices, self.num_replicas, self.options)

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of one option."""
        return dict(self.options).get(name, default)
