"""A manager of numbered checkpoints that keeps the newest."""

from __future__ import annotations

import os
from pathlib import Path

from distnb.checkpoint import files, folder_locks
from distnb.checkpoint.checkpoint import Checkpoint
from distnb.errors import OptionError
from distnb.runtime.chief_work.together import on_chief

__all__ = ["CheckpointManager", "latest_checkpoint"]


def latest_checkpoint(directory: str | os.PathLike[str], checkpoint_name: str = "ckpt") -> str | None:
    """Return the path of the newest numbered checkpoint of a `CheckpointManager` in a directory, or None.

    The function reads this process's own file system, and checks the files' sizes but not their content.
    """
    paths = reversed(files.numbered(Path(directory), checkpoint_name).values())
    return next((str(path) for path in paths if files.is_complete(path)), None)


class CheckpointManager:
    """Manager that saves a `Checkpoint` repeatedly, as `ckpt-1`, `ckpt-2`… of a directory, and deletes old ones.

    All replicas make it and call its methods, like those of the `Checkpoint`.

    Args:
        checkpoint: The checkpoint to save.
        directory: The directory, which is made when it is needed. From the first save on it belongs to this program:
            another program that saves there gets an error. Incomplete checkpoints of killed processes are deleted.
        max_to_keep: The number of newest checkpoints to keep; None: all.
        keep_every: Keep checkpoints whose number is a multiple of this forever.
        checkpoint_name: The beginning of the checkpoints' names.

    Raises:
        OptionError: An argument is invalid.

    Example:
        >>> import distnb, tempfile, torch
        >>> checkpoint = distnb.Checkpoint(model=torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = distnb.CheckpointManager(checkpoint, folder, max_to_keep=2)
        ...     for epoch in range(3):
        ...         path = manager.save()
        ...     restored = manager.restore_or_initialize()
        >>> [os.path.basename(each) for each in manager.checkpoints], os.path.basename(restored)
        (['ckpt-2', 'ckpt-3'], 'ckpt-3')
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        keep_every: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise OptionError(f"CheckpointManager takes a distnb.Checkpoint and got a {type(checkpoint).__name__}.")
        for name, value in (("max_to_keep", max_to_keep), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name}={value!r}: give a whole number, 1 or more, or None.")
        if not isinstance(checkpoint_name, str) or not checkpoint_name or os.sep in checkpoint_name:
            raise OptionError(f"checkpoint_name={checkpoint_name!r}: give the beginning of a file name.")
        self.checkpoint = checkpoint
        self.directory = os.path.abspath(directory)
        self._max_to_keep = max_to_keep
        self._keep_every = keep_every
        self._name = checkpoint_name
        self._numbers, self._existing = on_chief(self._clean_up)  # those of complete checkpoints, and of all

    def _clean_up(self) -> tuple[list[int], list[int]]:
        if os.path.isdir(self.directory):
            with folder_locks.is_free_for_cleaning(self._path(0)) as free:
                if free:
                    files.remove_unfinished(Path(self.directory), self._name)
        return self._found()

    def _found(self) -> tuple[list[int], list[int]]:
        found = files.numbered(Path(self.directory), self._name)
        return [number for number, path in found.items() if files.is_complete(path)], list(found)

    def _acquire_folder(self) -> tuple[list[int], list[int]]:
        """Acquire the folder's lock, and return the existing numbers: others may have saved before this program."""
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        is_new = folder_locks.keep(self._path(0))
        return self._found() if is_new else (self._numbers, self._existing)

    def _path(self, number: int) -> Path:
        return Path(self.directory, f"{self._name}-{number}")

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the complete checkpoints, the oldest first."""
        return [str(self._path(number)) for number in self._numbers]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest complete checkpoint, for `checkpoint.restore`; None if there is none."""
        return str(self._path(self._numbers[-1])) if self._numbers else None

    def save(self, checkpoint_number: int | None = None, *, wait: bool = True) -> str:
        """Save the checkpoint under the next number, and delete old checkpoints.

        Args:
            checkpoint_number: Another number than the next, such as the epoch's.
            wait: With False, return once the states are copied; see `Checkpoint.write`.

        Returns:
            The path of the checkpoint.

        Raises:
            OptionError: The number is taken.
            CheckpointError: Another program saves into the directory.
            OSError: The file system's error.
        """
        self.checkpoint._require_all_replicas()  # on every replica, before the replicas wait for each other
        self.checkpoint._finish()
        self._numbers, self._existing = on_chief(self._acquire_folder)
        last = self._existing[-1] if self._existing else 0
        number = last + 1 if checkpoint_number is None else int(checkpoint_number)
        if number < 0:
            raise OptionError(f"checkpoint_number={checkpoint_number!r}: give a whole number, 0 or more.")
        numbers = sorted({*self._numbers, number})
        old = numbers[: -self._max_to_keep] if self._max_to_keep is not None else []
        doomed = [each for each in old if not self._keep_every or each % self._keep_every]
        removed = [self._path(each) for each in doomed]
        path = self.checkpoint._write(lambda: self._path(number), wait, removed)
        self._numbers = [each for each in numbers if each not in doomed]
        self._existing = sorted({*self._existing, number}.difference(doomed))
        return path

    def wait(self) -> None:
        """Wait until the checkpoint that `save(wait=False)` started to write is complete."""
        self.checkpoint.wait()

    def close(self) -> None:
        """Wait until everything is written, and allow other programs to save into the directory. More saves are
        possible.
        """
        self.wait()
        on_chief(lambda: folder_locks.release_kept(self._path(0)))

    def restore_or_initialize(self) -> str | None:
        """Restore the newest complete checkpoint. Damaged ones are skipped with a warning, and never deleted.

        Returns:
            The path of the checkpoint, or None if there is none and the objects keep their initial state.

        Raises:
            CheckpointError: There are checkpoints but none is complete, or the newest lacks some objects.
        """
        paths = [self._path(number) for number in reversed(self._existing)]
        return self.checkpoint._restore(paths).path if paths else None
