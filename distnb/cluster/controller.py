"""`python -m distnb.cluster.controller NOTEBOOK_PID RUN_DIRECTORY`: ipyparallel's controller, ended with the notebook.

It is also the guard of the engines. Each engine watches the notebook itself, by a thread; but a thread starves while
C code holds the interpreter lock, and this process, which never computes, then ends that engine's group from outside.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from distnb.cluster.connection import remove_run_directory
from distnb.cluster.orphans import die_with, end_group, recorded_groups

__all__ = ["main"]


def main(notebook_pid: int, directory: Path, arguments: list[str]) -> None:
    """Run the controller until it is told to end, or the notebook is gone.

    Args:
        notebook_pid: The process to watch.
        directory: The cluster's run directory, removed with the notebook.
        arguments: ipyparallel's own command line.
    """
    own = os.getpid()

    def end_engines() -> None:
        for leader in recorded_groups(directory):
            if leader != own:
                end_group(leader)
        remove_run_directory(directory)

    os.umask(0o077)  # its connection files hold the key
    die_with(notebook_pid, first=end_engines)
    from ipyparallel.controller.app import IPController

    IPController.launch_instance(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
