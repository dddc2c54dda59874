"""The machines that mpiexec reaches, of Open MPI, MPICH and related implementations.

distnb sends no MPI messages. It uses mpiexec only to reach other machines, also inside a cluster manager's allocation.
Each engine has its own mpiexec, because a single one would end all engines as soon as the first engine ends.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence

from distnb.machines.host_plan import HostOptions
from distnb.machines.other_machines import NamedMachines
from distnb.machines.transport import MACHINE_AGENT, Transport, Way

__all__ = ["MPI", "MpiexecTransport"]

_SESSIONS = "OMPI_MCA_orte_local_tmpdir_base"


class MPI(NamedMachines):
    """Machines that mpiexec reaches, the argument `on` of `distnb.start`. They need the same environment, as for ssh.

    Args:
        machines, per_host, interface: See `distnb.SSH`.
        arguments: More arguments for mpiexec.

    Raises:
        OptionError: A name or a number is invalid.

    Example:
        >>> import distnb
        >>> cluster = distnb.start(8, on=distnb.MPI(["node1", "node2"]))      # doctest: +SKIP
    """

    def way(self, machines: HostOptions) -> Way:
        """Return the transport by mpiexec."""
        return Way(MpiexecTransport, (tuple(self.arguments),))


class MpiexecTransport(Transport):
    """The machines that mpiexec reaches. `arguments` are further arguments for it."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str) -> list[str]:
        """Return the command of an mpiexec that stays connected, with options that all implementations accept."""
        # By default, Open MPI binds a single process to a single core.
        mpiexec = ["mpiexec", "-n", "1", "--bind-to", "none", *self._arguments, "--host", host]
        return [*mpiexec, *MACHINE_AGENT]

    def environment(self) -> Mapping[str, str]:
        """Return an environment with a folder in the directory for Open MPI's session files.

        Open MPI leaves these files behind when it is killed. In the directory, they are removed with it. Each mpiexec
        has its own folder: if two start in the same folder at once, the second may fail to create it.
        """
        return {**os.environ, _SESSIONS: tempfile.mkdtemp(prefix="mpi", dir=self.directory)}

    def network_name(self, host: str) -> str:
        """Return the same name, because mpiexec resolves names like any other program."""
        return host

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the requirements of mpiexec."""
        return (
            f"mpiexec cannot start a process on {host}. It needs access to that machine (ssh without a password, or an "
            f"allocation with it), and the same Python environment at the same path ({sys.executable})."
        )
