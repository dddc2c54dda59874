"""`distnb.Checkpoint`: objects whose state is saved and restored together."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from distnb.checkpoint import files, folder_locks
from distnb.checkpoint.joint_saving import JointSave
from distnb.checkpoint.restore_status import RestoreStatus
from distnb.checkpoint.states.object_states import (
    check_object,
    handles_of_shards,
    holds_shards,
    restore_all,
    state_of,
    unused,
    write_parts_on_replicas,
)
from distnb.checkpoint.tensor_slices import TensorSlice, slice_of
from distnb.checkpoint.trees import encode
from distnb.errors import CheckpointError, ContextError, OptionError
from distnb.runtime import contexts
from distnb.runtime.chief_work.together import gather_lines, on_chief, raise_together
from distnb.runtime.this_process import this_process
from distnb.strategies.context import get_replica_context
from distnb.values.structure import flatten, map_structure, unflatten

__all__ = ["Checkpoint"]

_logger = logging.getLogger("distnb.checkpoint")


class Checkpoint:
    """Objects whose state is saved and restored together, under any strategy and number of replicas.

    A checkpoint stores each state under the name given here. It is a folder of safetensors files and one JSON file, so
    reading it executes nothing. It appears under its name once all of it is on the disk: if a process is killed while
    it saves, the earlier checkpoints remain intact. A checkpoint includes digests of its content.

    In a distributed cell and in scripts all replicas call its methods, in cross-replica context; replica 0 writes and
    reads the files. In the notebook its objects may be handles, and the files are in the notebook's file system.

    Of sharded tensors (torch's DTensors, as FSDP2 makes them) each replica writes and reads its own part. The folder is
    then one that all machines share.

    Args:
        objects: The objects by name: modules, optimizers, learning rate schedules, distributed datasets and anything
            else with `state_dict()` and `load_state_dict()`; `distnb.Variable`; tensors; dicts and lists of these.

    Raises:
        OptionError: An object cannot be restored in place, such as a number: make it a `distnb.Variable`.

    Example:
        >>> import distnb, tempfile, torch
        >>> model, step = torch.nn.Linear(2, 1), distnb.Variable(7)
        >>> checkpoint = distnb.Checkpoint(model=model, step=step)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.write(folder + "/first")
        ...     step = step.assign(0)
        ...     status = checkpoint.restore(path)
        >>> int(step)
        7
    """

    def __init__(self, **objects: Any) -> None:
        if not objects:
            raise OptionError("Checkpoint() got no objects. Name them: Checkpoint(model=model, …).")
        for name, value in objects.items():
            check_object(value, name)
        self._objects = objects
        self._writing: Future[None] | None = None
        self._joint: JointSave | None = None  # the last `wait=False` save in which every replica writes
        self._copies: list[Any] = []  # the copies of the last `wait=False` save; the next one reuses their memory

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[dict[str, Any]]]:
        return _make_checkpoint, (self._objects,)

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(f'{name}=<{type(each).__name__}>' for name, each in self._objects.items())})"

    # Saving ---------------------------------------------------------------------------------------------------------

    def write(self, path: str | os.PathLike[str], *, wait: bool = True) -> str:
        """Save the objects' states as the folder `path`.

        Args:
            path: The path of the new folder. It must not exist yet.
            wait: With False, return once the states are copied to host memory, and write them in a thread. The next
                call of `write`, `save`, `restore` or `wait` raises the thread's error, if any.

        Returns:
            The path.

        Raises:
            OptionError: The path exists, or a state contains something that a checkpoint cannot hold (the error names
                it).
            CheckpointError: Another program saves checkpoints of this name into the folder.
            ContextError: In a replica context.
            OSError: The file system's error, on every replica.
        """
        return self._write(lambda: Path(os.path.abspath(path)), wait)

    def save(self, prefix: str | os.PathLike[str], *, wait: bool = True) -> str:
        """Save the objects' states as the folder `prefix-1`, or with the number after that of the newest one.

        Args:
            prefix: The path without the number.
            wait: See `write`.

        Returns:
            The path, with its number.
        """
        start = Path(os.path.abspath(prefix))

        def target() -> Path:
            return start.with_name(f"{start.name}-{max(files.numbered(start.parent, start.name), default=0) + 1}")

        return self._write(target, wait)

    def _require_all_replicas(self) -> None:
        if contexts.in_replica():
            raise ContextError(
                "A Checkpoint cannot be saved in a replica context, inside a function that strategy.run calls. Save it "
                "after strategy.run."
            )

    def _write(self, target: Callable[[], Path], wait: bool, old: Sequence[Path] = ()) -> str:
        """Save to the path that `target` returns, then delete the `old` checkpoints.

        The chief does both, unless tensors are sharded.
        """
        self._require_all_replicas()
        self._finish()
        sharded = handles_of_shards(self._objects)
        if sharded:
            return self._write_from_notebook(sharded, target, wait, old)
        states = map_structure(slice_of, {name: state_of(value, name) for name, value in self._objects.items()})
        if any(isinstance(leaf, TensorSlice) for leaf in flatten(states)[0]):
            return self._write_jointly(JointSave(states, old), target, wait)

        def begin() -> str:
            path = target()
            with ExitStack() as locked:
                _lock(path, locked)
                kept = states if wait else self._copied(states)

                def write() -> None:
                    with lock_until_written:
                        files.write(path, kept)
                        for each in old:
                            files.remove(each)

                lock_until_written = locked.pop_all()
            if wait:
                write()
            else:
                self._writing = _writers().submit(write)
            return str(path)

        return on_chief(begin)

    def _write_jointly(self, save: JointSave, target: Callable[[], Path], wait: bool) -> str:
        """Save with every replica writing its part."""

        def begin() -> tuple[str, str]:
            path = target()
            with ExitStack() as locked:
                _lock(path, locked)
                unfinished = files.begin(path)
                save.lock = locked.pop_all()
            return str(path), str(unfinished)

        save.begin(*on_chief(begin))
        if wait:
            save.write()
        else:
            save.held = self._copied(save.held)
            self._joint, self._writing = save, _writers().submit(save.write_alone)
        return str(save.path)

    def _write_from_notebook(
        self, sharded: dict[str, Any], target: Callable[[], Path], wait: bool, old: Sequence[Path]
    ) -> str:
        """Save handles of sharded objects, which the replicas write, and other objects, which the notebook writes."""
        if not wait:
            raise OptionError(
                f"wait=False in the notebook, and {', '.join(sharded)} is sharded over the replicas. Save in the "
                "background in a %%distribute cell, or leave out wait=False."
            )
        others = {name: state_of(value, name) for name, value in self._objects.items() if name not in sharded}
        path = target()
        with ExitStack() as locked:
            _lock(path, locked)
            unfinished = files.begin(path)
            locked.callback(files.discard, unfinished)
            parts, described = write_parts_on_replicas(sharded, unfinished)
            of_others, tensors = encode(others)
            name = files.name_of_part(len(parts) + 1, len(parts) + 1)
            parts[name] = files.write_part(unfinished / name, files.held_here(tensors, chief=True))
            files.complete(unfinished, path, parts, {each: (described | of_others)[each] for each in self._objects})
            for each in old:
                files.remove(each)
        return str(path)

    def wait(self) -> None:
        """Wait until the checkpoint that `wait=False` started to write is complete.

        Raises:
            OSError: It could not be written.
        """
        self._finish()

    def _copied(self, states: Any) -> Any:
        """Return the states, with copies of all tensors in host memory."""
        leaves, shape = flatten(states)
        before = self._copies if len(self._copies) == len(leaves) else [None] * len(leaves)
        self._copies = [_copy(leaf, old) for leaf, old in zip(leaves, before, strict=True)]
        return unflatten(shape, self._copies)

    def _finish(self) -> None:
        """Wait until the last `wait=False` save is complete, on all replicas."""
        writing, self._writing = self._writing, None
        joint, self._joint = self._joint, None
        error: Exception | None = None
        if joint is not None:
            joint.end_wait()
        try:
            if writing is not None:
                writing.result()
        except Exception as raised:  # noqa: BLE001 - raised below, on all replicas
            error = raised

        def result() -> JointSave | None:
            if error is not None and joint is None:
                raise error
            return joint

        # A replica that replaces a lost one has not saved.
        if on_chief(lambda: result() is not None):
            try:
                raise_together(error)
                on_chief(lambda: joint.check() if joint is not None else None)
            finally:
                if joint is not None:
                    joint.close()

    # Restoring ------------------------------------------------------------------------------------------------------

    def restore(self, path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Restore the states of all objects from a checkpoint, or of none. The checkpoint may hold more states.

        All replicas may also call it in a replica context.

        Args:
            path: The result of `write` or `save`. None, the value of `latest_checkpoint` if there is none, does
                nothing.

        Returns:
            A status with TensorFlow's assertions: `assert_consumed()`, `expect_partial()`.

        Raises:
            CheckpointMismatchError: It lacks the state of an object, or holds that of another object. Nothing was
                changed.
            CheckpointError: It is not a complete checkpoint.
        """
        return self._restore([Path(os.path.abspath(path))]) if path is not None else RestoreStatus(None)

    read = restore  # TensorFlow's name for reading the result of `write`

    def _restore(self, paths: Sequence[Path]) -> RestoreStatus:
        """Restore the first complete checkpoint of several."""
        replica = get_replica_context() if contexts.in_replica() else None
        if replica is not None:
            status: RestoreStatus = replica.merge_call(lambda _: self._restore(paths))
            return status

        self._finish()
        if on_chief(lambda: holds_shards(self._objects)):
            path, states, left = self._found(on_chief(lambda: paths), _stored)
        else:
            path, states, left = on_chief(lambda: self._found(paths, files.read))
        restore_all(self._objects, states, path, gather_lines)
        _logger.info("restored %s; %d names in it have no object", path, len(left))
        return RestoreStatus(path, tuple(left))

    def _found(
        self, paths: Sequence[Path], read: Callable[[Path], dict[str, Any]]
    ) -> tuple[str, dict[str, Any], list[str]]:
        """Return the path of the first complete checkpoint, the states of the objects in it, and the other names."""
        path, states = _first_whole(paths, read)
        needed = {name: state if name in self._objects else None for name, state in states.items()}
        return str(path), needed, unused(self._objects, states)


def _make_checkpoint(objects: dict[str, Any]) -> Checkpoint:
    return Checkpoint(**objects)


def _lock(path: Path, locked: ExitStack) -> None:
    """Lock the folder for a checkpoint that does not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    locked.enter_context(folder_locks.saving(path))
    files.check_free(path)


def _stored(path: Path) -> dict[str, Any]:
    """Return the states of a checkpoint with tensors in files. Together the replicas check its content."""
    process = this_process.replica
    rank, size = (process.rank, process.size) if process is not None else (0, 1)
    states: dict[str, Any] = {}
    error: Exception | None = None
    try:
        states = files.stored(path, rank, size)
    except (CheckpointError, OSError) as raised:
        elsewhere = process is not None and process.workers[rank] != process.workers[0]
        where = f" All machines must share the folder; this is {socket.gethostname()}." if elsewhere else ""
        error = CheckpointError(f"{raised}{where}")
    raise_together(error)
    return states


def _first_whole(paths: Sequence[Path], read: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    damaged: list[CheckpointError] = []
    for path in paths:
        try:
            states = read(path)
        except CheckpointError as error:
            _logger.warning("%s is not used: %s", path, error)
            damaged.append(error)
            continue
        for one in damaged:
            warnings.warn(f"{one} distnb uses an older checkpoint: {path}", stacklevel=2)
        return path, states
    numbered = {} if paths[0].exists() else files.numbered(paths[0].parent, paths[0].name)
    others = [path for path in numbered.values() if files.is_complete(path)]
    if others:
        raise CheckpointError(f"{damaged[0]} `save` adds a number to the path: {others[-1]} is the newest.")
    raise damaged[0]


def _copy(leaf: Any, old: Any) -> Any:
    """Return a copy of a tensor in host memory, if possible in that of an old copy. Return anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(old, torch.Tensor) or old.shape != leaf.shape or old.dtype != leaf.dtype:
        old = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    return old.copy_(leaf.detach())


_threads: list[ThreadPoolExecutor] = []


def _writers() -> ThreadPoolExecutor:
    """Return the thread that writes. The end of the process waits for it."""
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, "distnb-checkpoint"))
        atexit.register(_threads[0].shutdown)
    return _threads[0]
