"""The transport by mpiexec, of Open MPI, MPICH and related implementations.

No MPI messages are involved. mpiexec knows how to reach other machines, also inside a cluster manager's allocation, and
is used only for that. Each engine has its own mpiexec, which ends with it: a single mpiexec would end all engines with
the first.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distnb.cluster.remote.base import NODE_AGENT, Transport

__all__ = ["MPI"]

_SESSIONS = "OMPI_MCA_orte_local_tmpdir_base"


class MPI(Transport):
    """The machines that mpiexec reaches. `arguments` are further arguments for it."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str, task: str) -> list[str]:
        """Return an mpiexec that stays connected, with options that all implementations understand."""
        # By default, Open MPI binds a single process to a single core.
        mpiexec = ["mpiexec", "-n", "1", "--bind-to", "none", *self._arguments, "--host", host]
        return [*mpiexec, *NODE_AGENT, task]

    def environment(self, directory: Path | None = None) -> Mapping[str, str]:
        """Return an environment with a directory for Open MPI's session files in the cluster's directory.

        Open MPI leaves these files behind when it is killed; there, they are removed with the cluster. Each mpiexec has
        a folder of its own: if two start at once in the same one, the second may fail to create it.
        """
        if directory is None:
            return os.environ
        return {**os.environ, _SESSIONS: tempfile.mkdtemp(prefix="mpi", dir=directory)}

    def network_name(self, host: str) -> str:
        """Return the same name: mpiexec resolves names like any program."""
        return host

    def unreached(self, host: str, status: int) -> str:
        """Return the requirements of mpiexec, for the error."""
        return (
            f"mpiexec cannot start a process on {host}. It needs a way there (ssh without a password, or an allocation "
            f"that it knows), and the same Python environment at the same path ({sys.executable})."
        )
