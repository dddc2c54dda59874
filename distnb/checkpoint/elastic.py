"""`distnb.elastic`: training that continues from its last saved commit when a launcher restarts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from distnb.checkpoint.checkpoint import Checkpoint
from distnb.checkpoint.manager import CheckpointManager
from distnb.errors import ContextError, OptionError
from distnb.runtime import choice, contexts
from distnb.runtime.this_process import this_process

__all__ = ["Commit", "elastic"]

T = TypeVar("T")

_KEPT = 2


def elastic(
    train: Callable[[Commit], T],
    checkpoint: Checkpoint,
    *,
    directory: str | os.PathLike[str] | None = None,
    save_every: int = 1,
) -> T:
    """Call a training function that continues from the last saved commit.

    `train` gets a function `commit`, which it calls between steps. With a directory, commits are saved there, and the
    newest one is restored when the script starts. torchrun's agent restarts the processes when one of them is lost, or
    when a machine joins or leaves: the script then continues with the replicas that there are.

    Steps since the last saved commit are made again, as if they had not been. So `train` must be a loop that continues
    from the objects in the checkpoint, such as the position of a distributed dataset. Plain Python variables are not
    restored.

    All replicas call this, after they have made their models, optimizers and datasets.

    Args:
        train: The training function.
        checkpoint: The objects that make up the state of the training.
        directory: A directory for a `CheckpointManager`, which keeps the newest two commits. Without one nothing is
            saved, and a restarted script trains from the beginning.
        save_every: With a directory, every how many commits one is saved.

    Returns:
        The result of `train`.

    Raises:
        OptionError: An argument is invalid.
        ContextError: In a replica context.

    Example:
        >>> import distnb, torch
        >>> w = distnb.Variable(torch.zeros(()))
        >>> def train(commit):
        ...     while w < 3:
        ...         w.assign_add(torch.ones(()))
        ...         commit()
        >>> distnb.elastic(train, distnb.Checkpoint(w=w))
        >>> float(w)
        3.0
    """
    if not isinstance(checkpoint, Checkpoint):
        raise OptionError(f"elastic takes a distnb.Checkpoint and got a {type(checkpoint).__name__}.")
    if not callable(train):
        raise OptionError(f"elastic takes a function to call with `commit`, and got a {type(train).__name__}.")
    if type(save_every) is not int or save_every < 1:
        raise OptionError(f"save_every={save_every!r}: give a whole number, 1 or more.")
    if contexts.in_replica():
        raise ContextError("distnb.elastic was called in a replica context. Call it outside strategy.run.")
    if this_process.replica is None and this_process.remote is None and choice.started_by_launcher():
        from distnb.runtime.spmd import join_from_env

        join_from_env()
    if directory is None:
        _warn_of_lost_training()
        return train(Commit(checkpoint, None, save_every))
    manager = CheckpointManager(checkpoint, directory, _KEPT)
    manager.restore_or_initialize()
    return train(Commit(checkpoint, manager, save_every))


class Commit:
    """The function that `train` calls between steps: `commit()` keeps the state of the training."""

    def __init__(self, checkpoint: Checkpoint, manager: CheckpointManager | None, save_every: int) -> None:
        self._checkpoint = checkpoint
        self._manager = manager
        self._save_every = save_every
        self._commits = 0

    def __call__(self) -> None:
        """Save the state, if it is this commit's turn. All replicas call this, in cross-replica context.

        Raises:
            ContextError: In a replica context.
        """
        self._checkpoint._require_all_replicas()
        self._commits += 1
        if self._manager is not None and self._commits % self._save_every == 0:
            self._manager.save()


def _warn_of_lost_training() -> None:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0") and os.environ.get("RANK", "0") == "0":
        print(
            "distnb: torchrun has restarted all processes, and distnb.elastic has no directory: the training "
            'starts from the beginning. Give it one, as in elastic(train, checkpoint, directory="commits").',
            file=sys.stderr,
        )
