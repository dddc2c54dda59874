"""The options of `%distnb start` for other machines, and the object `on` that they describe."""

from __future__ import annotations

import pkgutil
import shlex
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from distnb.errors import OptionError, closest

if TYPE_CHECKING:
    from distnb.cluster.resolvers import ClusterResolver
    from distnb.machines.other_machines import OtherMachines

__all__ = ["add_options", "read_options"]

_COMMON = ("per_host", "interface")
_LAUNCHED = ("hosts", "resolver", "launcher_args", *_COMMON)
_WAYS = {
    "ssh": ("ssh:SSH", ("hosts", "resolver", "ssh_args", *_COMMON)),
    "slurm": ("srun:Slurm", _LAUNCHED),
    "mpi": ("mpiexec:MPI", _LAUNCHED),
    "server": ("server_transport:Servers", ("resolver", "secret", *_COMMON)),
    "ray": ("ray_nodes:Ray", ("ray", "cpus_per_engine", "gpus_per_engine", "spread", "wait", "interface")),
    "ipyparallel": ("ipyparallel_cluster:IPythonParallel", ("ipyparallel", "wait", "interface")),
}
"""The class of each way to machines, and its options. The words are those for `--launcher`."""
_NAMING = ("hosts", "resolver", "ray", "ipyparallel")
_GROUP = "distnb.launchers"
"""The entry points of launchers in other packages: subclasses of `NamedMachines`, by the word for `--launcher`."""
_RESOLVERS = {
    "slurm": "SlurmClusterResolver",
    "tfconfig": "TFConfigClusterResolver",
    "kubernetes": "KubernetesClusterResolver",
}


def add_options(add: Callable[..., Any]) -> None:
    """Add the options to a parser, whose `add_argument` is given."""
    add("--hosts", metavar="A,B", help="machines to reach by ssh (default: this machine); a:4 for 4 engines on a")
    add("--per-host", metavar="N", type=int, help="number of engines on each machine")
    add("--interface", metavar="NAME", help="network interface towards the machines, such as eth0")
    add("--ssh-args", metavar="TEXT", default=[], type=shlex.split, help='arguments for ssh: "-p 2222"')
    add("--launcher", metavar="WORD", help="launcher of the engines: ssh, slurm, mpi, server, or a package's")
    add("--launcher-args", metavar="TEXT", default=[], type=shlex.split, help="arguments for srun or mpiexec")
    add(
        "--ray",
        metavar="ADDRESS",
        nargs="?",
        const="auto",
        help="run the engines on a Ray cluster (default: the one of this machine)",
    )
    add("--cpus-per-engine", metavar="N", type=float, help="CPUs that Ray reserves per engine (default: 1)")
    add("--gpus-per-engine", metavar="N", type=float, help="GPUs per engine on Ray (default: 1 if there are any)")
    add("--spread", action="store_true", help="let Ray put the engines on as many nodes as possible")
    add("--wait", metavar="SECONDS", type=float, help="time to wait for Ray's autoscaler, or for ipyparallel's engines")
    add(
        "--ipyparallel",
        metavar="PROFILE_OR_FILE",
        nargs="?",
        const="default",
        help="run an engine next to each engine of an ipyparallel cluster (default: of the profile `default`)",
    )
    add("--resolver", metavar="WORD", help="source of the machines' names: slurm, tfconfig, kubernetes, or a variable")
    add("--secret", metavar="FILE", help="file with the secret of the waiting servers")


def read_options(line: dict[str, Any], user_ns: Mapping[str, Any]) -> OtherMachines | None:
    """Remove the options from those of a line, and return the machines; None for this machine.

    Args:
        user_ns: The notebook's namespace, which has the variable that `--resolver` may name.

    Raises:
        OptionError: The options contradict each other, or are invalid.
    """
    names = {"launcher", *(name for _, takes in _WAYS.values() for name in takes)}
    read = {name: line.pop(name) for name in sorted(names)}
    given = {name: value for name, value in read.items() if not (value is None or value is False or value == [])}
    if "resolver" in given:
        given["resolver"] = _resolver(given["resolver"], user_ns)
    way = given.pop("launcher", None) or _usual_way(given)
    if way == "local":
        if given:
            raise OptionError(
                f"{_option(next(iter(given)))} is for engines on other machines. Name them, too: --hosts a,b, --ray or "
                "--ipyparallel."
            )
        return None
    others = entry_points(group=_GROUP)
    if way not in _WAYS and way not in others.names:
        known = ", ".join(["local", *_WAYS, *sorted(others.names)])
        raise OptionError(
            f"--launcher {way} is unknown. The launchers are {known}. Inside an allocation of another cluster manager, "
            "use mpi or ssh with its machines: --hosts a,b."
        )
    class_name, takes = _WAYS.get(way, ("", _LAUNCHED))
    for name in given:
        if name not in takes:
            raise OptionError(
                f"{_option(name)} does not apply to --launcher {way}, which takes {' and '.join(map(_option, takes))}."
            )
    naming = [name for name in _NAMING if name in given]
    if len(naming) > 1:
        raise OptionError(f"{' and '.join(map(_option, naming))} both name machines. Leave one out.")
    if not naming and way != "slurm":
        cure = "--hosts a,b" if "hosts" in takes else _option(takes[0])
        raise OptionError(f"--launcher {way} is for engines on other machines. Name them, too: {cure}.")
    machines = [given.pop(name) for name in naming]
    for name in {"ssh_args", "launcher_args"} & given.keys():
        given["arguments"] = given.pop(name)
    make: Callable[..., OtherMachines] = (
        pkgutil.resolve_name(f"distnb.machines.transports.{class_name}") if class_name else others[way].load()
    )
    return make(*machines, **given)


def _usual_way(given: Mapping[str, Any]) -> str:
    for word, naming in {"ipyparallel": "ipyparallel", "ray": "ray", "ssh": "hosts"}.items():
        if naming in given:
            return word
    if "resolver" in given:
        from distnb.cluster.resolvers import SlurmClusterResolver

        return "slurm" if isinstance(given["resolver"], SlurmClusterResolver) else "server"
    return "local"


def _resolver(word: str, user_ns: Mapping[str, Any]) -> ClusterResolver:
    from distnb.cluster import resolvers

    if word in _RESOLVERS:
        made: ClusterResolver = getattr(resolvers, _RESOLVERS[word])()
        return made
    found = user_ns.get(word)
    if isinstance(found, resolvers.ClusterResolver):
        return found
    known = ", ".join(_RESOLVERS)
    what = f"{word} is a {type(found).__name__}" if word in user_ns else f"there is no {word}"
    raise OptionError(
        f"%distnb start --resolver {word}: {what}{closest(word, _RESOLVERS)}. Name one of {known}, or a variable "
        "of the notebook that is a ClusterResolver."
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
