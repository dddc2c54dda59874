"""`distnb.elastic`: training that continues when replicas are lost, and when others join."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from distnb.checkpoint.checkpoint import Checkpoint
from distnb.checkpoint.chief import gather_lines
from distnb.checkpoint.manager import CheckpointManager
from distnb.checkpoint.states.object_states import restore_all, state_of
from distnb.checkpoint.tensor_slices import is_sharded
from distnb.errors import ContextError, OptionError, ProgramError
from distnb.input.dataset import DistributedDataset
from distnb.runtime import choice, contexts, randomness
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.scripts.elastic_member import ElasticMember, become_member
from distnb.runtime.this_process import this_process
from distnb.values.structure import flatten, map_structure, unflatten

__all__ = ["Commit", "elastic"]

T = TypeVar("T")

_KEPT = 2
_MIRRORED = ("mirrored", "multi_worker")


def elastic(
    train: Callable[[Commit], T],
    checkpoint: Checkpoint,
    *,
    directory: str | os.PathLike[str] | None = None,
    save_every: int = 1,
) -> T:
    """Call a training function, and call it again after replicas were lost or have joined, from the last commit.

    `train` gets a function `commit`, which it calls between steps. Each commit keeps the states of the checkpoint's
    objects and the random states. Under `distnb run --min`, a lost replica ends the step that is under way. The other
    replicas form a new group, restore the last commit from memory and call `train` again. A new replica runs the script
    up to `elastic` alone, as one replica of one. It joins at the next commit of the others, and receives its state from
    them.

    Steps since the last commit are made again, as if they had not been. So `train` must be a loop that continues from
    the objects in the checkpoint, such as the position of a distributed dataset. Plain Python variables are not
    restored.

    With a directory, commits are saved there, too, and the newest one is restored when the script starts. torchrun
    restarts all processes when one is lost, so there the state survives only in a directory.

    All replicas of a script call this once, after they have made their models, optimizers and datasets. In a notebook
    it works as under a launcher that is not elastic: it restores, trains and saves.

    Args:
        train: The training function.
        checkpoint: The objects that make up the state of the training.
        directory: A directory for a `CheckpointManager`, which keeps the newest two commits.
        save_every: With a directory, every how many commits one is saved.

    Returns:
        The result of `train`.

    Raises:
        OptionError: An argument is invalid.
        ContextError: In a replica context, or at the second call under `distnb run --min`.
        ProgramError: All replicas that had the state were lost, and there is no directory.

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
    member = become_member()
    commit = Commit(checkpoint, directory, save_every, member)
    if member is None:
        commit.train(train)
        return cast(T, commit.result)
    return _train_with_others(train, commit, member)


class _Regroup(BaseException):
    """The end of a call of `train` at a commit, because the group changes. `except Exception` does not catch it."""


def _train_with_others(train: Callable[[Commit], T], commit: Commit, member: ElasticMember) -> T:
    """Train in one generation of the group after another."""
    _check_strategies()
    if member.is_new:
        member.join()
    while True:
        try:
            commit.train(train)
            commit.end()
            break
        except _Regroup:
            pass
        except BaseException as error:
            if not member.lost_others(error):
                raise
        member.join()
        if member.is_finished:  # the others know that all have trained; this one was interrupted as it learned that
            break
    member.done()
    return cast(T, commit.result)


def _check_strategies() -> None:
    process = this_process.replica
    for strategy in process.strategies if process is not None else ():
        if strategy.spec.kind not in _MIRRORED:
            raise OptionError(
                f"{strategy!r} cannot continue with other replicas: its state is not a whole copy on each. Use "
                "MirroredStrategy, or leave out --min and give distnb.elastic a directory."
            )


class Commit:
    """The function that `train` calls between steps: `commit()` keeps the state of the training.

    Attributes:
        result: The result of the latest call of `train` that returned.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str] | None,
        save_every: int,
        member: ElasticMember | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._save_every = save_every
        self._member = member
        self._manager: CheckpointManager | None = None
        self._commits = -1
        self._kept: Any = None
        self._memory: list[torch.Tensor] = []
        self.result: Any = None

    def __call__(self) -> None:
        """Keep the state. All replicas call this, in cross-replica context.

        Raises:
            ContextError: In a replica context.
        """
        self._checkpoint._require_all_replicas()
        self._keep()
        if self._manager is not None and self._commits % self._save_every == 0:
            self._manager.save()
        process, member = this_process.replica, self._member
        if member is None or process is None or member.is_finished:
            return
        # All leave `train` at the same commit, or none.
        if any(process.group.all_gather_object(member.must_regroup)):
            raise _Regroup

    def train(self, train: Callable[[Commit], Any]) -> None:
        """Begin from the last commit, and call the training function."""
        if self._directory is not None:  # made again by all, because some are new
            self._manager = CheckpointManager(self._checkpoint, self._directory, _KEPT)
        if self._member is None:
            self._restore_saved()
            self._commits = 0
        else:
            self._continue(self._member)
        self.result = train(self)

    def end(self) -> None:
        """Wait until all replicas have trained."""
        process = this_process.replica
        if process is not None and process.size > 1:
            process.group.all_gather_object("trained")

    # -- in memory ---------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        if self._member is not None:
            self._kept = self._state()
        self._commits += 1

    def _state(self) -> tuple[Any, bytes]:
        """Return copies of the objects' states, and the random states. The memory of the last copies is used again."""
        objects = self._checkpoint._objects
        leaves, shape = flatten({name: state_of(value, name) for name, value in objects.items()})
        if any(map(is_sharded, leaves)):
            raise OptionError(
                "The checkpoint holds sharded tensors (DTensors). They cannot continue with other replicas: a lost "
                "replica takes its part with it. Leave out --min and give distnb.elastic a directory."
            )
        before = iter(self._memory)
        copies = [
            _copy(leaf, next(before, None)) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
            for leaf in leaves
        ]
        self._memory = [each for each in copies if isinstance(each, torch.Tensor)]
        return unflatten(shape, copies), randomness.captured()

    def _continue(self, member: ElasticMember) -> None:
        """Give all replicas the newest commit that one of them has, or the initial state if there was no commit."""
        process = this_process.replica
        assert process is not None, "the member has joined a group"
        found = process.group.all_gather_object((self._commits, member.is_new))
        newest = max(commits for commits, _ in found)
        if newest >= 0:
            kept, are_equal = self._kept, all(commits == newest for commits, _ in found)
            source = next(rank for rank, (commits, _) in enumerate(found) if commits == newest)
        else:
            restored, old = self._restore_saved(), [rank for rank, (_, is_new) in enumerate(found) if not is_new]
            if not (restored or old):
                raise ProgramError(
                    "All processes that had the state of the training were lost before the new ones received it. Give "
                    "distnb.elastic a directory to survive that."
                )
            kept, are_equal, source = self._state(), len(old) == len(found), (old or [0])[0]
        if not are_equal:
            kept = broadcast_tree(process.group, kept, source)
        # Only now: a replica that is interrupted before has what it had, and receives the state in the next group.
        self._kept, self._commits = kept, max(newest, 0)
        self._restore(*kept)

    def _restore(self, states: Any, random: bytes) -> None:
        process = this_process.replica
        assert process is not None
        process.discard_gradients()
        for each in flatten(self._checkpoint._objects)[0]:
            if isinstance(each, DistributedDataset):
                each.deal_again()
        fresh = map_structure(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), states
        )
        restore_all(self._checkpoint._objects, fresh, "The last commit", gather_lines)
        randomness.restore(random)

    # -- on the disk -------------------------------------------------------------------------------------------------

    def _restore_saved(self) -> bool:
        if self._manager is None:
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            if restarts not in ("", "0") and os.environ.get("RANK", "0") == "0":
                print(
                    "distnb: torchrun has restarted all processes, and distnb.elastic has no directory: the training "
                    'starts from the beginning. Give it one, as in elastic(train, checkpoint, directory="commits").',
                    file=sys.stderr,
                )
            return False
        return self._manager.restore_or_initialize() is not None


def _copy(leaf: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a tensor in host memory, if possible in that of an old copy."""
    if old is None or old.shape != leaf.shape or old.dtype != leaf.dtype:
        old = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    return old.copy_(leaf.detach())
