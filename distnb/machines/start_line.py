"""The options of `%distnb start` for other machines, and the object `on` that they describe."""

from __future__ import annotations

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
_TAKES = {
    "ssh": ("hosts", "resolver", "ssh_args", *_COMMON),
    "slurm": ("hosts", "resolver", "launcher_args", *_COMMON),
    "mpi": ("hosts", "resolver", "launcher_args", *_COMMON),
    "server": ("resolver", "secret", *_COMMON),
    "ray": ("ray", "cpus_per_engine", "gpus_per_engine", "spread", "wait", "interface"),
    "ipyparallel": ("ipyparallel", "wait", "interface"),
}
_LAUNCHERS = ("local", "ssh", "slurm", "mpi", "server")
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
    names = {"launcher", *(name for takes in _TAKES.values() for name in takes)}
    read = {name: line.pop(name) for name in sorted(names)}
    given = {name: value for name, value in read.items() if not (value is None or value is False or value == [])}
    launcher = given.pop("launcher", None)
    if "resolver" in given:
        given["resolver"] = _resolver(given["resolver"], user_ns)
    kind = _kind(launcher, given)
    if kind is None:
        return None
    takes = _TAKES.get(kind, _TAKES["mpi"])
    for name in given:
        if name not in takes:
            raise OptionError(f"{_option(name)} does not apply to {_way(kind)}, which takes {_list(takes)}.")
    if kind == "ray":
        from distnb.machines.transports.ray_nodes import Ray

        return Ray(given.pop("ray"), **given)
    if kind == "ipyparallel":
        from distnb.machines.transports.ipyparallel_cluster import IPythonParallel

        return IPythonParallel(given.pop("ipyparallel"), **given)
    return _named(kind, given)


def _kind(launcher: str | None, given: Mapping[str, Any]) -> str | None:
    """Return the way to the machines, a key of `_TAKES`; None for this machine."""
    if launcher not in (None, *_LAUNCHERS) and launcher not in (others := entry_points(group=_GROUP).names):
        raise OptionError(
            f"--launcher {launcher} is unknown. The launchers are {', '.join([*_LAUNCHERS, *sorted(others)])}. Inside "
            "an allocation of another cluster manager, use mpi or ssh with its machines: --hosts a,b."
        )
    for kind in ("ipyparallel", "ray"):
        if kind in given:
            if launcher is not None:
                raise OptionError(f"--launcher {launcher} does not apply to {_way(kind)}. Leave it out.")
            return kind
    for name in _TAKES["ray"][1:-1]:
        if name in given:
            other = ", or --ipyparallel" if name == "wait" else ""
            raise OptionError(f"{_option(name)} is for engines on a Ray cluster. Give --ray{other}, too.")
    if launcher is None:
        launcher = "local" if "hosts" not in given else "ssh"
        if "resolver" in given:
            from distnb.cluster.resolvers import SlurmClusterResolver

            launcher = "slurm" if isinstance(given["resolver"], SlurmClusterResolver) else "server"
        if launcher == "local" and given:
            raise OptionError(f"{_option(*given)} is for engines on other machines. Name them, too: --hosts a,b.")
    if launcher != "local":
        return launcher
    if given:
        raise OptionError(
            f"--launcher local starts engines on this machine, but {_option(*given)} is for other machines. Leave one "
            "out."
        )
    return None


def _named(kind: str, given: dict[str, Any]) -> OtherMachines:
    from distnb.machines.transports.mpiexec import MPI
    from distnb.machines.transports.server_transport import Servers
    from distnb.machines.transports.srun import Slurm
    from distnb.machines.transports.ssh import SSH

    if "resolver" in given and "hosts" in given:
        raise OptionError(f"{_option('hosts')} and --resolver both name machines. Leave one out.")
    machines = given.pop("resolver", given.pop("hosts", None))
    if machines is None and kind != "slurm":
        option = "--resolver WORD" if kind == "server" else "--hosts a,b"
        raise OptionError(f"--launcher {kind} is for engines on other machines. Name them, too: {option}.")
    if kind == "server":
        return Servers(machines, **given)
    arguments = given.pop("ssh_args", given.pop("launcher_args", ()))
    usual: Mapping[str, Callable[..., OtherMachines]] = {"ssh": SSH, "slurm": Slurm, "mpi": MPI}
    make = usual[kind] if kind in usual else entry_points(group=_GROUP)[kind].load()
    return make(machines, arguments=arguments, **given)


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


def _option(name: str, *others: str) -> str:
    return f"--{name.replace('_', '-')}"


def _list(names: tuple[str, ...]) -> str:
    return " and ".join(map(_option, names))


def _way(kind: str) -> str:
    return {"ray": "engines on a Ray cluster", "ipyparallel": "engines on an ipyparallel cluster"}.get(
        kind, f"--launcher {kind}"
    )
