"""The registry of detached clusters: one file for each cluster, in the user's folder for the state of programs.

It is `distnb/clusters` in XDG_STATE_HOME, or in ~/.local/state. Several machines may share the folder, so an entry
names its machine. A cluster can be connected to on that machine only.
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from distnb.cluster.connection import write_private_file
from distnb.errors import NoClusterError, OptionError, closest

__all__ = ["Entry", "add", "entries", "find", "remove"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


@dataclass(frozen=True)
class Entry:
    """A detached cluster.

    Attributes:
        host: The name of the machine on which its daemon runs.
        pid: The process id of the daemon.
        socket: The path of the daemon's socket.
        started: The time of its start, in seconds since 1970.
    """

    name: str
    host: str
    pid: int
    socket: str
    started: float

    @property
    def is_here(self) -> bool:
        """True if the daemon runs on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """True if the daemon accepts connections, or runs on another machine, where this process cannot ask it."""
        if not self.is_here:
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self.socket)
            except BlockingIOError:  # it has many clients that wait
                return True
            except OSError:
                return False
        return True


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    parent = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return parent / "distnb" / "clusters"


def _path(name: str) -> Path:
    return _folder() / f"{name}.json"


def add(entry: Entry) -> Entry:
    """Add a cluster, and return its entry. An empty name is replaced by a free one: "cluster-1", "cluster-2", …

    Raises:
        OptionError: The name is invalid, or a cluster of this name runs.
    """
    if entry.name and not _NAME.fullmatch(entry.name):
        raise OptionError(
            f"name={entry.name!r}: give up to 64 letters, digits, dots, dashes and underscores. The first must be a "
            "letter or a digit."
        )
    with _locked():
        if not entry.name:
            free = (name for number in itertools.count(1) if not _is_taken(name := f"cluster-{number}"))
            entry = dataclasses.replace(entry, name=next(free))
        elif _is_taken(entry.name):
            raise OptionError(
                f"A detached cluster {entry.name!r} is running. Connect to it (%distnb connect {entry.name}), stop it "
                f"(distnb stop {entry.name}), or choose another name."
            )
        new = _path(f".{entry.name}")  # a reader never sees a part of the file
        write_private_file(new, json.dumps(dataclasses.asdict(entry)).encode())
        os.replace(new, _path(entry.name))
    return entry


def _is_taken(name: str) -> bool:
    found = _read(_path(name))
    return found is not None and found.is_running


@contextmanager
def _locked() -> Iterator[None]:
    """Exclude other processes that change the registry: of two that start a cluster of one name, one gets it."""
    _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(_folder() / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> Entry | None:
    try:
        return Entry(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remove(entry: Entry) -> None:
    """Remove a cluster that ends, unless another one has its name meanwhile."""
    with suppress(OSError), _locked():
        if _read(_path(entry.name)) == entry:
            _path(entry.name).unlink()


def entries() -> list[Entry]:
    """Return the user's detached clusters, the oldest first. Those that were killed are removed."""
    found = []
    for path in _folder().glob("[!.]*.json"):
        entry = _read(path)
        if entry is not None and entry.is_running:
            found.append(entry)
        elif entry is not None:
            remove(entry)
    return sorted(found, key=lambda entry: entry.started)


def find(name: str) -> Entry:
    """Return the detached cluster of this name.

    Raises:
        NoClusterError: No such cluster runs on this machine.
    """
    known = {entry.name: entry for entry in entries()}
    if name not in known:
        names = f" Your detached clusters: {', '.join(known)}." if known else " You have no detached cluster."
        raise NoClusterError(
            f"There is no detached cluster {name!r}{closest(name, known)}.{names} It may have reached its time limit, "
            "or the machine may have been restarted."
        )
    if not known[name].is_here:
        raise NoClusterError(
            f"The detached cluster {name!r} runs on {known[name].host}, and this is {socket.gethostname()}. Connect to "
            "it from a notebook on that machine."
        )
    return known[name]
