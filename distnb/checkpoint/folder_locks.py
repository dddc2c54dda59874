"""Locks that prevent two programs from saving checkpoints of one name into one folder.

A lock is a POSIX lock of a hidden file in the folder. The kernel frees it when its process ends, however it ends, and
a forked child does not inherit it. (With `flock` it would: a DataLoader's worker that outlives a killed program would
hold the lock.) A process holds a lock once, for all its threads, from its first save until its program ends: a script,
or a cell. Only a process that holds the lock removes the remains of a killed program.

The file is removed with the lock, so another process may acquire the lock of a file that is already removed:

    holder      lock "ckpt"   …   unlink   close
    another               open                    lock, then see that the name leads to no such file: open again
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from distnb.errors import CheckpointError
from distnb.runtime.program_ends import at_program_end

__all__ = ["is_free_for_cleaning", "keep", "release_kept", "saving"]

_logger = logging.getLogger("distnb.checkpoint")


_PATIENCE_S, _POLL_S = 3.0, 0.05


@dataclass
class _Lock:
    """A lock that this process holds.

    Attributes:
        descriptor: The descriptor of the locked file; None if the file system has no locks.
        writers: A token for each checkpoint that is being written.
        kept: True if the lock is held after they have been written.
    """

    descriptor: int | None
    writers: set[object] = field(default_factory=set)
    kept: bool = False


_locks: dict[Path, _Lock] = {}
_guard = threading.RLock()  # a thread may write a checkpoint


@contextmanager
def saving(target: Path) -> Iterator[None]:
    """Hold the lock for a checkpoint's name while it is written.

    Args:
        target: The checkpoint. Its folder exists. `ckpt-1` and `ckpt-2` share one lock.

    Raises:
        CheckpointError: Another program holds the lock.
    """
    path, this = _path_of(target), object()
    try:
        with _held(path) as lock:
            lock.writers.add(this)
        yield
    finally:
        with _guard:
            if path in _locks:
                _locks[path].writers.discard(this)
            _release_unused(path)


def keep(target: Path) -> bool:
    """Keep the lock for a checkpoint's name until `release_kept`, or the process's end.

    Returns:
        True if the lock was not kept before, so that other programs may have saved in the meantime.

    Raises:
        CheckpointError: Another program holds the lock.
    """
    with _held(_path_of(target)) as lock:
        is_new, lock.kept = not lock.kept, True
        return is_new


def release_kept(target: Path | None = None) -> None:
    """Release locks that were kept, except those that a thread needs to write.

    Args:
        target: A checkpoint whose name is released. None for all, because the program that saved has ended.
    """
    with _guard:
        for path in list(_locks) if target is None else [_path_of(target)]:
            if path in _locks:
                _locks[path].kept = False
                _release_unused(path)


@contextmanager
def is_free_for_cleaning(target: Path) -> Iterator[bool]:
    """Hold the lock if it is free and this process is not writing. Yield whether it is held."""
    path = _path_of(target)
    with _guard:
        try:
            lock = _locked(path)
        except (CheckpointError, OSError):
            yield False
            return
        try:
            yield lock.descriptor is not None and not lock.writers
        finally:
            _release_unused(path)


def _path_of(target: Path) -> Path:
    """Return the file that is locked for a checkpoint's name, by its real path: POSIX locks belong to the file."""
    matched = re.fullmatch(r"(.+)-\d+", target.name)
    return Path(os.path.realpath(target.parent), f".{matched[1] if matched else target.name}.lock")


@contextmanager
def _held(path: Path) -> Iterator[_Lock]:
    """Hold a lock and `_guard`. Wait a while for a program that is just ending and may still write."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with _guard:
            try:
                lock = _locked(path)
            except CheckpointError:
                if time.monotonic() > deadline:
                    raise
            else:
                yield lock
                return
        time.sleep(_POLL_S)


def _locked(path: Path) -> _Lock:
    if path not in _locks:
        _locks[path] = _Lock(_acquired(path))
    return _locks[path]


def _release_unused(path: Path) -> None:
    lock = _locks.get(path)
    if lock is None or lock.writers or lock.kept:
        return
    del _locks[path]
    if lock.descriptor is not None:
        with suppress(OSError):
            path.unlink()
        os.close(lock.descriptor)


def _acquired(path: Path) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "a process that has just started"
            os.close(descriptor)
            raise CheckpointError(
                f"Another program saves checkpoints {path.name[1:].removesuffix('.lock')!r} into {path.parent}: "
                f"{holder}. Give each program its own folder, or end that one first."
            ) from None
        except OSError as error:  # a file system without locks
            os.close(descriptor)
            _logger.warning("%s is not locked: %s", path, error)
            return None
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                _logger.debug("locked %s", path)
                return descriptor
        os.close(descriptor)


def _forget() -> None:
    """Drop the parent's locks in a forked child."""
    global _guard
    _guard = threading.RLock()
    for lock in _locks.values():
        if lock.descriptor is not None:
            os.close(lock.descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_forget)
at_program_end(release_kept)
atexit.register(release_kept)  # the kernel frees the lock but leaves its file
