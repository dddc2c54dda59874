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
    "AutoShardPolicy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DATA_LIMIT_NBYTES",
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
]


class _Named(enum.Enum):
    """Members that users may also give as strings, in any case."""

    @classmethod
    def parse(cls, name: Self | str) -> Self:
        """The member that a user named.

        Raises:
            OptionError: There is none of that name; it lists those that are. (It is a ValueError.)
        """
        if isinstance(name, cls):
            return name
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        given = repr(name) if name is None or isinstance(name, str | int | float) else f"a {type(name).__name__}"
        raise OptionError(
            f"{given} is no {cls.__name__}. There are {', '.join(repr(each.name) for each in cls)}, as strings or as "
            f"members of distnb.{cls.__name__}."
        )


class ReduceOp(_Named):
    """How values of several replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"


class VariableSynchronization(_Named):
    """When the replicas' components of a variable become one."""

    AUTO = "AUTO"
    """ON_WRITE."""
    NONE = "NONE"
    """Never: refused, since a plain tensor does that."""
    ON_WRITE = "ON_WRITE"
    """At each assignment: all replicas hold the same value."""
    ON_READ = "ON_READ"
    """When it is read outside replicas: each replica assigns to, and reads, a component of its own."""


class VariableAggregation(_Named):
    """How the replicas' components become one value."""

    NONE = "NONE"
    """Not at all: what would need it is an error."""
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
    """Replica 0's, of all replicas of all machines."""


DATA_LIMIT_NBYTES = 64_000_000
"""The default size above which data stays on the engines."""

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate(_UNITS) if power}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?i?)B?")


def nbytes_of(size: int | str) -> int:
    """Return a size in bytes, given as a number or as text.

    Raises:
        OptionError: It is no size. (It is a ValueError.)

    Example:
        >>> nbytes_of("1.5 GB")
        1500000000
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None or found[2] not in _UNITS:
        raise OptionError(f"{size!r} is no size. Give a number of bytes, or text such as '64 MB', '2GB' or '512MiB'.")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class RunOptions:
    """How `Strategy.run` behaves when it is called from the notebook.

    Attributes:
        wait: Wait until every replica has reported structure and status (never the tensors). With False the
            calls are pipelined, and errors are raised at the next use of a result or at the cell's end.
    """

    wait: bool = True


class AutoShardPolicy(_Named):
    """What each worker (machine) of several reads of a dataset.

    With one worker all are the same. Under OFF, FILE and HINT every worker reads global batches of its own. Each is cut
    into one slice for each replica of all workers, which the worker's replicas take in turn: a step has as many
    examples as under DATA. Workers that have read everything get empty batches until the last one has.
    """

    OFF = "OFF"
    """Everything: each worker reads the whole dataset, in an order of its own where it is shuffled."""
    AUTO = "AUTO"
    """FILE for a dataset that says which files it is made of, if they are as many as the workers; DATA for others."""
    FILE = "FILE"
    """Every n-th file. The dataset has the attribute `files`, a sequence, and the method `with_files(files)`, which
    gives a dataset like itself that reads these files only."""
    DATA = "DATA"
    """The replicas' slices of the same global batches: the numbers are those of one replica."""
    HINT = "HINT"
    """What the dataset's own method `shard(num_workers, worker_index)` gives."""


class InputReplicationMode(_Named):
    """How many input pipelines `distribute_datasets_from_function` makes."""

    PER_WORKER = "PER_WORKER"
    """One for each worker, whose replicas take its batches in turn."""
    PER_REPLICA = "PER_REPLICA"
    """One for each replica."""


_PREFIX = "experimental_"


@dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset is fed. tf.distribute's names, with `experimental_`, are accepted too.

    Attributes:
        fetch_to_device: Bring batches to the replica's device; with False they stay in host memory.
        replication_mode: See `InputReplicationMode`; a name will do.
        place_dataset_on_device: Only False: datasets run on the host.
        per_replica_buffer_size: tf.distribute's name of `prefetch`.
        prefetch: Batches read ahead per replica; None means as many as there are replicas where the data is read
            from end to end, or its copies to a GPU are started early; 0 none.
        collate: What a DataLoader's own `collate_fn` sees on each replica: "slice", the examples of the replica's
            slice; "global", those of the whole global batch, from which the slice is then cut; "auto", the slice
            where it is torch's own, else the whole batch, since padding and mixing would make a difference.
        auto_shard_policy: See `AutoShardPolicy`; a name will do.

    Raises:
        OptionError: An option that is malformed, or that cannot be honoured.
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


def _made_with_prefixes(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def make(self: InputOptions, *args: Any, **options: Any) -> None:
        given = {name.removeprefix(_PREFIX): value for name, value in options.items()}
        if unknown := given.keys() - set(_INPUT_OPTIONS):
            raise OptionError(f"InputOptions has no option {unknown.pop()!r}. There are {', '.join(_INPUT_OPTIONS)}.")
        init(self, *args, **given)

    return make


InputOptions.__init__ = _made_with_prefixes(InputOptions.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class InputContext:
    """What `distribute_datasets_from_function` tells the function about the input pipeline that it makes.

    Attributes:
        num_input_pipelines: How many there are: one for each worker.
        input_pipeline_id: Which of them this is.
        num_replicas_in_sync: Replicas of all workers together.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The examples of a global batch that each replica gets.

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
    """How replicas communicate."""

    AUTO = "AUTO"
    """NCCL where each replica has a GPU of its own; memory that the replicas of one machine share; else Gloo's ring."""
    RING = "RING"
    """Gloo's ring over sockets, also for GPUs, whose tensors go through host memory."""
    NCCL = "NCCL"
    """NCCL, or an error where it cannot be."""


@dataclass(frozen=True)
class CommunicationOptions:
    """How the replicas of a MultiWorkerMirroredStrategy, or those of one call of all_reduce or all_gather, communicate.

    Attributes:
        bytes_per_pack: Gradients, and the tensors of one reduce or all_reduce, travel in packs, each of which is closed
            once it is larger than this. 0 leaves the size to distnb.
        timeout_seconds: How long a replica waits in one collective for the others before it raises; None for as long
            as they are alive.
        implementation: See `CommunicationImplementation`; a name will do.

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
        """These options with what others say instead: whatever of theirs is not the default.

        Example:
            >>> CommunicationOptions(bytes_per_pack=5).merge(CommunicationOptions(timeout_seconds=9.0)).bytes_per_pack
            5
        """
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise OptionError(f"merge takes a distnb.CommunicationOptions and got {options!r}.")
        said = {each.name: getattr(options, each.name) for each in fields(options)}
        return replace(self, **{name: value for name, value in said.items() if value != _SAYS_NOTHING[name]})


_SAYS_NOTHING = {each.name: each.default for each in fields(CommunicationOptions)}


@dataclass(frozen=True)
class ValueContext:
    """What `distribute_values_from_function` tells the function about the replica it makes a value for."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True)
class StrategySpec:
    """Everything that says which strategy is meant; equal specs name the same strategy object in every process.

    Attributes:
        kind: The word of the magic: "default", "one_device", "mirrored", "multi_worker", "central_storage", "tpu".
        devices: Devices in replica order, as strings; empty for "all that the cluster has".
        num_replicas: Replicas in sync; 0 while it is not yet known.
        options: Sorted (name, value) pairs of hashable options, such as ("gradient_reduction", "mean").
    """

    kind: str
    devices: tuple[str, ...] = ()
    num_replicas: int = 0
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __reduce__(self) -> tuple[Any, ...]:
        """Every program brings one: without the names of its fields."""
        return StrategySpec, (self.kind, self.devices, self.num_replicas, self.options)

    @property
    def device_type(self) -> str:
        """The type that all its devices must have; "" for any."""
        return "tpu" if self.kind == "tpu" else ""

    def option(self, name: str, default: Any = None) -> Any:
        """The value of one option."""
        return dict(self.options).get(name, default)
