"""The tree of errors that distnb raises::

    DistnbError
    ├── ClusterError                     engines could not be started, reached or kept
    │   ├── StartError                   `%distnb start` failed; nothing was left behind
    │   ├── NoClusterError               an operation needs engines and there are none
    │   ├── EngineDied                   an engine's process ended while it was needed
    │   ├── ReplicaStuck                 a replica is in code that no signal interrupts
    │   └── ServerLost                   a parameter server ended; its variables are lost until recovery
    ├── ProgramError                     a distributed program could not run as written
    │   ├── ContextError      (RuntimeError)   called in the wrong context, or strategies mixed
    │   ├── StructureError    (ValueError)     replicas returned or received different structures
    │   ├── OptionError       (ValueError)     an unknown option, or one that cannot be honoured
    │   ├── ClosureCancelled               a scheduled closure was cancelled before it had a result
    │   ├── EndOfDataset                   a closure read past the end of a finite dataset
    │   ├── DistributedValueError (TypeError)  a PerReplica used as if it were one plain value
    │   ├── OutOfSyncError    (AssertionError) values that should be equal differ between replicas
    │   └── UnknownNameError  (AttributeError) distnb, a strategy or a PerReplica has no such attribute
    ├── CollectiveError       (RuntimeError)   replicas could not communicate
    │   └── CollectiveMismatchError            they called different collectives
    ├── GradientError         (RuntimeError)   gradients that would be wrong
    │   ├── MeanLossError                      a mean loss under SUM aggregation
    │   └── UnsyncedGradientError              an optimizer step on a gradient never aggregated
    ├── NamespaceError                   a name cannot be carried between notebook and engines
    │   ├── CannotTravelError (TypeError)      its value cannot be sent
    │   ├── StaleHandleError  (RuntimeError)   the object it represents no longer exists
    │   └── UnassignedError   (NameError)      this replica never assigned it
    ├── CheckpointError                  a checkpoint is damaged, or another program saves there
    │   └── CheckpointMismatchError (AssertionError)  it does not match the objects
    ├── InvariantError      (AssertionError)  distnb's own state contradicts itself: a defect
    ├── LibraryVersionError (ImportError)  another library's version is not supported
    ├── MissingFeatureError (ImportError)  the folder of a feature was removed from this installation
    ├── RemoteError                      a replica's exception whose type cannot be sent
    └── MessageError          (ValueError)     invalid bytes on a channel

`ProgramAborted` is not in the tree: it ends a replica's program from outside. It derives from BaseException, as
KeyboardInterrupt does, so that user code that catches Exception does not catch it.
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
    "InvariantError",
    "LibraryVersionError",
    "MeanLossError",
    "MessageError",
    "MissingFeatureError",
    "NamespaceError",
    "NoClusterError",
    "OptionError",
    "OutOfSyncError",
    "ProgramAborted",
    "ProgramInterrupted",
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
    """Return a hint at the known word that is most similar, or "" if none is."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


class DistnbError(Exception):
    """Base of all errors of distnb. The text of each says what happened, what was received, and the cure."""


class ClusterError(DistnbError):
    """Engines could not be started, reached or kept."""


class StartError(ClusterError):
    """A cluster could not start. All processes that had been started were ended."""


class NoClusterError(ClusterError):
    """An operation needs engines and none are running."""


class EngineDied(ClusterError):
    """An engine's process ended while it was needed."""


class ReplicaStuck(ClusterError):
    """A replica is still busy with an earlier program, in code that no signal interrupts."""


class ServerLost(ClusterError):
    """A parameter server has ended. Its variables are lost until recovery."""


class ProgramError(DistnbError):
    """A distributed program could not run as it is written."""


class ContextError(ProgramError, RuntimeError):
    """A function was called in the wrong context (replica or cross-replica), or two strategies were mixed."""


class StructureError(ProgramError, ValueError):
    """Replicas returned or received structures that do not match."""


class OptionError(ProgramError, ValueError):
    """An option is unknown or malformed, or the strategy cannot honour it."""


class ClosureCancelled(ProgramError):
    """A scheduled closure was cancelled before it had a result: another one failed, or the user interrupted."""


class EndOfDataset(ProgramError):
    """A closure read past the end of a worker's finite dataset."""


class DistributedValueError(ProgramError, TypeError):
    """A distributed value was used as if it were one plain value."""


class OutOfSyncError(ProgramError, AssertionError):
    """The replicas' copies of an argument of `assert_in_sync` are not equal bit by bit."""


class UnknownNameError(ProgramError, AttributeError):
    """An object of distnb has no attribute of the requested name.

    Args:
        owner: The object, in words.
        name: The requested name.
        known: The names that exist.
        cure: A sentence that says what to write instead.
    """

    def __init__(self, owner: str, name: str, known: Iterable[str] = (), cure: str = "") -> None:
        known = tuple(known)
        # Libraries probe for names with an underscore, and catch the error; a hint would be wasted work.
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
    """Gradients would make the step wrong."""


class MeanLossError(GradientError):
    """A loss reduced by mean reached parameters whose gradients are summed over the replicas."""


class UnsyncedGradientError(GradientError):
    """An optimizer stepped on mirrored parameters whose gradients were never aggregated."""


class NamespaceError(DistnbError):
    """A name cannot be carried between the notebook and the engines."""


class CannotTravelError(NamespaceError, TypeError):
    """The value of a name cannot be sent to the engines."""


class StaleHandleError(NamespaceError, RuntimeError):
    """The object of a handle no longer exists: its engine was restarted, or the object was freed."""


class UnassignedError(NamespaceError, NameError):
    """A name was read on a replica that did not assign it. Other replicas did."""


class CheckpointError(DistnbError):
    """A checkpoint is incomplete, damaged or not distnb's, or another program saves into its folder."""


class CheckpointMismatchError(CheckpointError, AssertionError):
    """A checkpoint does not match the restored objects, or holds more than they need."""


class InvariantError(DistnbError, AssertionError):
    """A state machine of distnb is in a state that contradicts itself; checked if DISTNB_VALIDATE is 1."""


class LibraryVersionError(DistnbError, ImportError):
    """Another library is installed in a version that distnb does not support."""


class MissingFeatureError(DistnbError, ImportError):
    """A feature is needed whose folder was removed from this installation."""


class RemoteError(DistnbError):
    """A replica's exception whose own type cannot be sent to the notebook."""


class MessageError(DistnbError, ValueError):
    """Bytes arrived on a channel that are not a valid message."""


class ProgramAborted(BaseException):
    """The end of this replica's program, because another replica failed or the user interrupted."""


class ProgramInterrupted(ProgramAborted, KeyboardInterrupt):
    """The end of this replica's program, because the user interrupted. `except KeyboardInterrupt` catches it."""
