"""Frozen option types and enumerations, importable without torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from distnb.errors import OptionError

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "InputOptions",
    "ReduceOp",
    "RunOptions",
    "StrategySpec",
    "ValueContext",
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
        raise OptionError(
            f"{name!r} is no {cls.__name__}. There are {', '.join(repr(each.name) for each in cls)}, as strings or as "
            f"members of distnb.{cls.__name__}."
        )


class ReduceOp(_Named):
    """How values of several replicas become one. Strings are accepted in any case."""

    SUM = "SUM"
    MEAN = "MEAN"


@dataclass(frozen=True)
class RunOptions:
    """How `Strategy.run` behaves when it is called from the notebook.

    Attributes:
        wait: Wait until every replica has reported structure and status (never the tensors). With False the
            calls are pipelined, and errors are raised at the next use of a result or at the cell's end.
    """

    wait: bool = True


@dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset is fed.

    Attributes:
        prefetch: Batches read ahead per replica; None means as many as there are replicas, 0 none.
        collate: What a DataLoader's own `collate_fn` sees on each replica: "slice", the examples of the replica's
            slice; "global", those of the whole global batch, from which the slice is then cut; "auto" tries out on a
            few examples whether that makes a difference.
    """

    prefetch: int | None = None
    collate: Literal["auto", "slice", "global"] = "auto"

    def __post_init__(self) -> None:
        if self.prefetch is not None and (
            isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0
        ):
            raise OptionError(
                f"prefetch={self.prefetch!r}: give a whole number of batches, 0 or more, or None "
                "for as many as there are replicas."
            )
        if self.collate not in ("auto", "slice", "global"):
            raise OptionError(f"collate={self.collate!r} is unknown. Give 'auto', 'slice' or 'global'.")


class CommunicationImplementation(_Named):
    """How replicas communicate. Strings are accepted in any case."""

    AUTO = "AUTO"
    """NCCL where each replica has a GPU of its own, Gloo elsewhere; shared memory between replicas of one machine."""
    RING = "RING"
    """Gloo's ring over sockets, also for GPUs, whose tensors go through host memory."""
    NCCL = "NCCL"
    """NCCL, or an error where it cannot be."""


@dataclass(frozen=True)
class CommunicationOptions:
    """How the replicas of a MultiWorkerMirroredStrategy communicate.

    Attributes:
        bytes_per_pack: Gradients are reduced in packs, each of which is closed once it is larger than this. 0 leaves
            the size to distnb.
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


@dataclass(frozen=True)
class ValueContext:
    """What `distribute_values_from_function` tells the function about the replica it makes a value for."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True)
class StrategySpec:
    """Everything that says which strategy is meant; equal specs name the same strategy object in every process.

    Attributes:
        kind: The word of the magic: "default", "one_device", "mirrored", "multi_worker".
        devices: Devices in replica order, as strings; empty for "all that the cluster has".
        num_replicas: Replicas in sync; 0 while it is not yet known.
        options: Sorted (name, value) pairs of hashable options, such as ("gradient_reduction", "mean").
    """

    kind: str
    devices: tuple[str, ...] = ()
    num_replicas: int = 0
    options: tuple[tuple[str, Any], ...] = field(default=())

    def option(self, name: str, default: Any = None) -> Any:
        """The value of one option."""
        return dict(self.options).get(name, default)
