"""Other machines by mpiexec, of Open MPI, MPICH and their kin.

No MPI is spoken: mpiexec knows the ways to other machines, inside the allocation of a cluster manager too, and that is
all that is asked of it. One mpiexec for each engine, which ends with it: one for all would end all with the first.
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
    """Machines that mpiexec reaches; `arguments` are more for it."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str, task: str) -> list[str]:
        """An mpiexec that stays, with what all kinds of mpiexec understand."""
        # Open MPI would bind a single process to a single core.
        mpiexec = ["mpiexec", "-n", "1", "--bind-to", "none", *self._arguments, "--host", host]
        return [*mpiexec, *NODE_AGENT, task]

    def environment(self, directory: Path | None = None) -> Mapping[str, str]:
        """Open MPI, when it is ended, leaves the files of its session: they go with the cluster's.

        Each mpiexec has a folder of its own: of two that begin at once in one, the second may fail to make it.
        """
        if directory is None:
            return os.environ
        return {**os.environ, _SESSIONS: tempfile.mkdtemp(prefix="mpi", dir=directory)}

    def network_name(self, host: str) -> str:
        """The same: mpiexec looks names up as any program does."""
        return host

    def unreached(self, host: str, status: int) -> str:
        """What has to be so."""
        return (
            f"mpiexec starts nothing on {host}. It needs a way there (ssh without a password, or an allocation that it "
            f"knows of), and the same Python environment at the same path ({sys.executable})."
        )
