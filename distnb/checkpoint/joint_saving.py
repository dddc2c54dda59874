"""A save in which every replica writes its part of the sharded tensors.

    replica 0        begin (lock, make the folder)   write part 1   receive the facts   describe and rename
    other replicas   receive the folder              write part 2   send the facts      receive the outcome

A thread cannot communicate with other replicas. In the background, each replica leaves a note in the folder once its
part is on the disk, and the last one completes the checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distnb.checkpoint import files
from distnb.checkpoint.trees import encode
from distnb.errors import CheckpointError
from distnb.runtime.chief_work.together import gather_values, on_chief, raise_together
from distnb.runtime.this_process import this_process

__all__ = ["JointSave"]

_LOCKED_S, _POLL_S = 60.0, 0.05


class JointSave:
    """A save of sharded tensors, on one replica. All replicas make it and call its methods.

    Args:
        states: The states by name, with slices for sharded tensors.
        old: Checkpoints to delete afterwards.
        others: The number of parts that other processes add.

    Attributes:
        held: The tensors that this replica writes.
        path: The checkpoint.
        lock: The lock of the folder, on the chief.
    """

    def __init__(self, states: Any, old: Sequence[Path] = (), others: int = 0) -> None:
        process = this_process.replica
        rank = process.rank if process is not None else 0
        self._described, tensors = encode(states)
        self._is_chief = rank == 0
        self._old = old
        self.held = files.held_here(tensors, chief=self._is_chief)
        writers = [writer for writer, writes in enumerate(gather_values(self._is_chief or bool(self.held))) if writes]
        self._count = len(writers) + others
        self._name = files.name_of_part(writers.index(rank) + 1, self._count) if rank in writers else None
        self.path = Path()
        self._unfinished = Path()
        self._is_begun = False
        self._is_awaited = threading.Event()
        self.lock = ExitStack()

    def begin(self, path: str, unfinished: str) -> None:
        """Accept the paths that the chief has chosen."""
        self.path, self._unfinished, self._is_begun = Path(path), Path(unfinished), True

    def write(self) -> None:
        """Write the checkpoint. If a replica fails, there is none, and all replicas raise its error."""
        try:
            parts, described = self.write_parts()
            on_chief(lambda: files.complete(self._unfinished, self.path, parts, described))
            on_chief(self._remove_old)
        finally:
            self.close()

    def write_parts(self) -> tuple[dict[str, Any], Any]:
        """Write the parts of all replicas. Return the facts of each, and the description of the states."""
        facts, error = None, None
        try:
            facts = self._write_part()
        except Exception as raised:  # noqa: BLE001 - raised on all replicas
            error = raised
        raise_together(error)
        gathered = gather_values((self._name, facts, self._described if self._is_chief else None))
        return {name: each for name, each, _ in gathered if name is not None}, gathered[0][2]

    def _write_part(self) -> Any:
        return files.write_part(self._unfinished / self._name, self.held) if self._name is not None else None

    def _remove_old(self) -> None:
        for each in self._old:
            files.remove(each)

    def write_alone(self) -> None:
        """Write this replica's part without the other replicas, in a thread. The last replica completes it."""
        with self.lock:
            facts = self._write_part()
            if self._name is None:
                return
            described = self._described if self._is_chief else None
            files.leave_note(self._unfinished, self._name, facts, described)
            if files.complete_from_notes(self._unfinished, self.path, self._count):
                self._remove_old()
            elif self._is_chief:
                self._keep_lock()

    def _keep_lock(self) -> None:
        """Wait for the other replicas, for a limited time: nobody should delete the folder while they write."""
        deadline = time.monotonic() + _LOCKED_S
        while time.monotonic() < deadline and not self.path.exists() and not self._is_awaited.wait(_POLL_S):
            pass

    def end_wait(self) -> None:
        """End the thread soon: the replicas wait for each other now."""
        self._is_awaited.set()

    def check(self) -> None:
        """Raise CheckpointError unless `write_alone` of all replicas has completed the checkpoint."""
        if self.path.exists():
            return
        missing = files.missing_parts(self._unfinished, self._count)
        # A shared file system may have hidden the last notes from the replica that left one of them.
        if not missing and files.complete_from_notes(self._unfinished, self.path, self._count):
            self._remove_old()
            return
        raise CheckpointError(
            f"{self.path} was not saved: {', '.join(missing) or 'its description'} was not written. Was a replica lost "
            f"meanwhile? All machines must share {self.path.parent}."
        )

    def close(self) -> None:
        """Release the folder, and delete the remains of a save that has failed."""
        if self._is_chief and self._is_begun:
            files.discard(self._unfinished)
            self.lock.close()
