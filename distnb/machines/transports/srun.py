"""The nodes of the Slurm allocation in which the notebook runs.

ipyparallel would submit a batch job, whose engines start at some later time without a connection to this process. Here,
each engine has an srun that stays connected, inside the existing allocation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distnb.cluster.resolvers import ClusterResolver
from distnb.cluster.resolvers.host_list import expand_counts, expand_host_list
from distnb.errors import OptionError, StartError
from distnb.machines.host_plan import HostOptions
from distnb.machines.other_machines import NamedMachines
from distnb.machines.transport import MACHINE_AGENT, Transport, Way

__all__ = ["Slurm", "SrunTransport"]

_NEEDED = (
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # each engine is a step; all share the node's part of the allocation
    "--mem=0",
    "--export=ALL",
    "--input=all",
    "--output=all",
    "--error=all",
)
_USUAL = ("--job-name=distnb", "--cpu-bind=none", "--mpi=none")
_KEPT = re.compile(r"SLURM_(JOB.*|CONF|CLUSTERS|JWT|WORKING_CLUSTER)")
_CANCELLED = re.compile(r"\*\*\* (\S+ \S+ ON \S+ CANCELLED .*?) \*\*\*")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


@dataclass(frozen=True)
class Slurm(NamedMachines):
    """Nodes of the Slurm allocation in which this process runs, the argument `on` of `distnb.start`.

    Args:
        machines: The names of nodes, as for `distnb.SSH`. None for all nodes of the allocation. Or a resolver of
            `distnb.cluster_resolver`.
        per_host: The number of engines on each node. None for one per GPU; without GPUs the number of tasks that were
            requested from Slurm, or two.
        interface: The network interface, or the address, at which this machine listens for the engines.
        arguments: More arguments for srun.

    Raises:
        OptionError: This process runs in no allocation, or a name or a number is invalid.

    Example:
        >>> import distnb
        >>> cluster = distnb.start(on=distnb.Slurm())        # doctest: +SKIP
    """

    machines: str | Sequence[str] | ClusterResolver | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = _allotted_nodes()
        for name in self._named():
            if name not in nodes:
                raise OptionError(f"{name!r} is not a node of this Slurm allocation. Its nodes are {', '.join(nodes)}.")

    def _resolve(self) -> HostOptions:
        found = super()._resolve()
        hosts, without_gpus = found.hosts or _allotted_nodes(), found.without_gpus or _tasks_of_nodes()
        return replace(found, hosts=hosts, without_gpus=without_gpus)

    def way(self, machines: HostOptions) -> Way:
        """Return the transport by srun."""
        return Way(SrunTransport, (tuple(self.arguments),))


class SrunTransport(Transport):
    """The nodes of this process's allocation. `arguments` are further arguments for srun."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str) -> list[str]:
        """Return the command of an srun that stays connected."""
        # If an option is given twice, srun uses the last value. So the user can override `_USUAL`, but not `_NEEDED`.
        srun = ["srun", *_USUAL, *self._arguments, *_NEEDED, f"--nodelist={host}"]
        return [*srun, *MACHINE_AGENT]

    def environment(self) -> Mapping[str, str]:
        """Return the environment without the variables of a surrounding step, which srun would read as options."""
        return {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or _KEPT.fullmatch(name)
        }

    def network_name(self, host: str) -> str:
        """Return the address by which Slurm itself reaches a node."""
        command = ["scontrol", "show", "node", host, "--oneliner"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise StartError(
                f"There are no Slurm programs on this machine: {error}. Start the notebook on a node of the cluster."
            ) from error
        found = _ADDRESS.search(done.stdout)
        if found is None:
            said = (done.stderr or done.stdout).strip()
            raise StartError(f"Slurm gives no address of the node {host}. `{' '.join(command)}` says: {said}")
        return found[1]

    def cause(self, output: str) -> str:
        """Return Slurm's reason for cancelling a step: scancel, or its time limit."""
        found = _CANCELLED.findall(output)
        return f"Slurm says: {found[-1]}" if found else ""

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the requirements of srun."""
        return (
            f"srun cannot start a process on {host}. The node must be up, and have the same Python environment at the "
            f"same path ({sys.executable}) as this machine."
        )


def _allotted_nodes() -> tuple[str, ...]:
    """Return the nodes of the allocation in which this process runs."""
    text = os.environ.get("SLURM_JOB_NODELIST", "")
    if not text or not os.environ.get("SLURM_JOB_ID"):
        raise OptionError(
            "distnb.Slurm (--launcher slurm) needs an allocation, but this process runs in none (SLURM_JOB_ID and "
            "SLURM_JOB_NODELIST are not set). Get one, with --no-kill so that it outlives a node, and start Jupyter "
            "inside: `salloc --no-kill --nodes=2 jupyter lab`, or the same by sbatch."
        )
    return tuple(expand_host_list(text))


def _tasks_of_nodes() -> dict[str, int]:
    """Return the number of tasks on each node that were requested with the allocation; empty if only nodes were."""
    asked = any(os.environ.get(f"SLURM_{name}") for name in ("NTASKS_PER_NODE", "NTASKS", "NPROCS"))
    counts = os.environ.get("SLURM_TASKS_PER_NODE", "")
    if not asked or not counts:
        return {}
    nodes = _allotted_nodes()
    numbers = expand_counts(counts)
    if len(numbers) != len(nodes):  # the numbers describe the notebook's own step
        return {}
    return dict(zip(nodes, numbers, strict=True))
