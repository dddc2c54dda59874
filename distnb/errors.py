"""Every error that distnb raises, in one tree::

    DistnbError
    ├── ClusterError                     engines could not be started, reached or kept
    │   ├── StartError                   `%distnb start` failed; nothing was left behind
    │   ├── NoClusterError               an operation needs engines and there are none
    │   ├── EngineDied                   an engine's process ended while it was needed
    │   ├── ReplicaStuck                 a replica sits in code that no signal reaches
    │   └── ServerLost                   a parameter server ended; what it held is gone until recovery
    ├── ProgramError                     a distributed program could not run as written
    │   ├── ContextError      (RuntimeError)   called in the wrong context, or strategies mixed
    │   ├── StructureError    (ValueError)     replicas returned, or were given, unlike structures
    │   ├── OptionError       (ValueError)     an option that is unknown or cannot be honoured
    │   ├── ClosureCancelled               a scheduled closure was ended before it had a result
    │   ├── EndOfDataset                   a closure asked a finite dataset for more than it has
    │   ├── DistributedValueError (TypeError)  a PerReplica used as if it were one plain value
    │   ├── OutOfSyncError    (AssertionError) replicas hold different bits of what should be equal
    │   └── UnknownNameError  (AttributeError) distnb, a strategy or a PerReplica has nothing of that name
    ├── CollectiveError       (RuntimeError)   replicas could not communicate
    │   └── CollectiveMismatchError            they called different collectives
    ├── GradientError         (RuntimeError)   gradients that would be wrong
    │   ├── MeanLossError                      a mean loss under SUM aggregation
    │   └── UnsyncedGradientError              an optimizer step on a gradient never aggregated
    ├── NamespaceError                   a name cannot be carried between notebook and engines
    │   ├── CannotTravelError (TypeError)      its value cannot be sent
    │   ├── StaleHandleError  (RuntimeError)   the object it stands for is gone
    │   └── UnassignedError   (NameError)      this replica never assigned it
    ├── CheckpointError                  a checkpoint is torn or foreign, or another program saves there
    │   └── CheckpointMismatchError (AssertionError)  it does not fit the objects, or they are not all of it
    ├── LibraryVersionError (ImportError)  another library's version is not supported
    ├── RemoteError                      stands for a replica's exception whose type cannot travel
    └── MessageError          (ValueError)     bytes on a channel that are no message of ours

`ProgramAborted` stands outside: it ends a replica's program from without, so it derives from
BaseException, as KeyboardInterrupt does, and user code that catches Exception lets it pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CannotTravelError",
    "CheckpointError",
    "CheckpointMismatchError",
    "ClosureCancelled",
    "ClusterError",
    "CollectiveError",
    "CollectiveMismatchError",
    "ContextError",
    "DistnbError",
    "DistributedValueError",
    "EndOfDataset",
    "EngineDied",
    "GradientError",
    "LibraryVersionError",
    "MeanLossError",
    "MessageError",
    "NamespaceError",
    "NoClusterError",
    "OptionError",
    "OutOfSyncError",
    "ProgramAborted",
    "ProgramError",
    "RemoteError",
    "ReplicaStuck",
    "ServerLost",
    "StaleHandleError",
    "StartError",
    "StructureError",
    "UnassignedError",
    "UnknownNameError",
    "UnsyncedGradientError",
    "closest",
]


def closest(word: str, known: Iterable[str]) -> str:
    """A hint at what was probably meant, or nothing."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


class DistnbError(Exception):
    """Base of every error of distnb. Its text says what happened, what was received, and the cure."""


class ClusterError(DistnbError):
    """Engines could not be started, reached or kept."""


class StartError(ClusterError):
    """A cluster could not start. Everything that had been started was ended again."""


class NoClusterError(ClusterError):
    """An operation needs engines and none are running."""


class EngineDied(ClusterError):
    """An engine's process ended while it was needed."""


class ReplicaStuck(ClusterError):
    """A replica sits in code that no signal reaches, and is still busy with an earlier program."""


class ServerLost(ClusterError):
    """A parameter server has ended; what it held is gone until recovery."""


class ProgramError(DistnbError):
    """A distributed program could not run as it is written."""


class ContextError(ProgramError, RuntimeError):
    """A call in the wrong context (replica or cross-replica), or two strategies mixed."""


class StructureError(ProgramError, ValueError):
    """Replicas returned, or were given, structures that do not match."""


class OptionError(ProgramError, ValueError):
    """An option that is unknown, malformed, or that this strategy cannot honour."""


class ClosureCancelled(ProgramError):
    """A scheduled closure was ended before it had a result: another one failed, or the user interrupted."""


class EndOfDataset(ProgramError):
    """A closure asked a worker's dataset, which is finite, for more than it has."""


class DistributedValueError(ProgramError, TypeError):
    """A distributed value was used as if it were one plain value."""


class OutOfSyncError(ProgramError, AssertionError):
    """Replicas hold different bits of something that `assert_in_sync` was asked about."""


class UnknownNameError(ProgramError, AttributeError):
    """Something of distnb was asked for a name that it does not have.

    Args:
        owner: Whose name it would be, in words.
        name: It.
        known: Names that there are.
        cure: What to write instead, in a sentence.
    """

    def __init__(self, owner: str, name: str, known: Iterable[str] = (), cure: str = "") -> None:
        known = tuple(known)
        # Libraries ask for many a name with an underscore, and tell nobody.
        near = "" if name.startswith("_") else closest(name, known)
        super().__init__(f"{owner} has no attribute {name!r}{near}.{' ' if cure else ''}{cure}")
        self.__made_of = owner, name, known, cure

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, str, tuple[str, ...], str]]:
        return type(self), self.__made_of


class CollectiveError(DistnbError, RuntimeError):
    """Replicas could not communicate."""


class CollectiveMismatchError(CollectiveError):
    """Replicas called different collectives, or the same ones with other shapes, dtypes or order."""


class GradientError(DistnbError, RuntimeError):
    """Gradients that would make the step wrong."""


class MeanLossError(GradientError):
    """A loss reduced by mean reached parameters whose gradients are summed over the replicas."""


class UnsyncedGradientError(GradientError):
    """An optimizer stepped on mirrored parameters whose gradients were never aggregated."""


class NamespaceError(DistnbError):
    """A name cannot be carried between the notebook and the engines."""


class CannotTravelError(NamespaceError, TypeError):
    """The value of a name cannot be sent to the engines."""


class StaleHandleError(NamespaceError, RuntimeError):
    """The object that a handle stands for is gone: its engine was restarted, or it was freed."""


class UnassignedError(NamespaceError, NameError):
    """A name was assigned on some replicas only, and is read on one that never did."""


class CheckpointError(DistnbError):
    """A checkpoint is torn, damaged or foreign, or another program saves into its folder."""


class CheckpointMismatchError(CheckpointError, AssertionError):
    """A checkpoint does not fit the objects that are restored, or holds more than they take."""


class LibraryVersionError(DistnbError, ImportError):
    """Another library is installed in a version that distnb does not work with."""


class RemoteError(DistnbError):
    """Stands for an exception of a replica whose own type cannot travel to the notebook."""


class MessageError(DistnbError, ValueError):
    """Bytes arrived on a channel that are no message of ours."""


class ProgramAborted(BaseException):
    """Ends this replica's program because another replica failed, or the user interrupted."""
