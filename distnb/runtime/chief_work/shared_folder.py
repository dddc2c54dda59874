"""Folders that all replicas of a program use."""

from __future__ import annotations

import os
import socket
import tempfile

from distnb.errors import OptionError
from distnb.runtime.chief_work.together import on_chief
from distnb.runtime.this_process import this_process

__all__ = ["shared_folder"]


def shared_folder(prefix: str = "distnb-", parent: str | os.PathLike[str] | None = None) -> str:
    """Create a new folder for all replicas, and return its path.

    In a `%%distribute` cell, a scope, a function that `strategy.run` calls, or a script, all replicas call this
    together: replica 0 creates the folder. In an ordinary cell, and in a script of one process, it is the notebook's or
    the process's. Nobody deletes the folder.

    The folders of several machines are the same only on a file system that the machines share. If replicas are on
    several machines, the folder is therefore created in the working directory, and all of them check that it is there.
    An ordinary cell does not check this.

    Args:
        prefix: The beginning of the folder's name.
        parent: The folder in which it is created. By default the system's folder for temporary files, or the working
            directory if there are several machines.

    Returns:
        The absolute path.

    Raises:
        OptionError: A replica on another machine does not have the folder.
        OSError: The folder cannot be created.

    Example:
        >>> folder = shared_folder("checkpoints-")
        >>> os.path.basename(folder).startswith("checkpoints-")
        True
        >>> os.rmdir(folder)
    """
    path = on_chief(lambda: _created(prefix, parent))
    process = this_process.replica
    if process is None or process.size == 1:
        return path
    missing = "" if os.path.isdir(path) else socket.gethostname()
    if hosts := sorted({host for host in process.group.all_gather_object(missing) if host}):
        if process.rank == 0:
            os.rmdir(path)
        raise OptionError(
            f"shared_folder has created {path} on replica 0's machine, but {', '.join(hosts)} does not have it. Name a "
            'folder on a file system that all machines share: distnb.shared_folder(parent="/shared/folder").'
        )
    return path


def _created(prefix: str, parent: str | os.PathLike[str] | None) -> str:
    process = this_process.replica
    if process is None or process.size == 1:
        several_machines = bool(this_process.machines())
    else:
        several_machines = len(set(process.workers)) > 1
    default = os.getcwd() if several_machines else None
    return os.path.abspath(tempfile.mkdtemp(prefix=prefix, dir=default if parent is None else parent))
