"""`python -m distnb.cluster.local.guardian PID DIRECTORY`: ends the recorded process groups when a process is gone.

Every engine watches the notebook by a thread of its own. A thread starves while C code holds the interpreter lock;
this process never computes, and then ends the engine's group from outside.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from distnb.cluster.connection import remove_run_directory
from distnb.cluster.local.orphans import die_with, end_group, recorded_groups

__all__ = ["guard"]


def guard(pid: int, directory: Path) -> None:
    """Watch a process from now on; with it go all groups recorded in the directory, the directory, and this process.

    Args:
        pid: The notebook's process.
        directory: A cluster's run directory.
    """
    own = os.getpid()

    def end_groups() -> None:
        for leader in recorded_groups(directory):
            if leader != own:
                end_group(leader)
        remove_run_directory(directory)

    die_with(pid, first=end_groups)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard(int(sys.argv[1]), Path(sys.argv[2]))
    threading.Event().wait()
