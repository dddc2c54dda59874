"""Where the notebook's parts are put together: the session, the front end that shows it, the strategies' runtime."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distnb.errors import NoClusterError, StartError
from distnb.notebook.views.front_end import FrontEnd
from distnb.options import DATA_LIMIT_NBYTES

if TYPE_CHECKING:
    from distnb.cluster.resolvers.base import ClusterResolver
    from distnb.cluster.start_options import StartOptions
    from distnb.notebook.session import Session
    from distnb.notebook.views.runs import History
    from distnb.topology import Device

__all__ = ["attach", "current", "history", "machines", "require", "start", "start_with", "stop"]


_front = FrontEnd()
_session: Session | None = None
_lock = threading.RLock()


def current() -> Session | None:
    """The running session, or None."""
    return _session if _session is not None and _session.alive else None


def require() -> Session:
    """The running session; NoClusterError if there is none."""
    session = current()
    if session is None:
        raise NoClusterError("No cluster is running. Start one with %distnb start -n 2, or distnb.start(2).")
    return session


def history() -> History | None:
    """The runs that the front end drew; None without one."""
    return _front.history


def attach(front: FrontEnd) -> None:
    """Show what happens by a front end from now on."""
    global _front
    from distnb.notebook.namespace import module_watch
    from distnb.runtime.this_process import this_process

    with _lock:
        _front = front
        module_watch.versions[:] = [_front.module_version]
        this_process.live_sink = _front.live
        _register_remote()
        _follow(current())


def _register_remote() -> None:
    """Let strategies of several replicas run on the session, or on the one that the front end starts for them."""
    from distnb.notebook.remote_runtime import Remote
    from distnb.runtime.this_process import this_process

    this_process.remote = lambda strategy: Remote(strategy, lambda: _front.session_for(strategy) or require())
    this_process.machines = machines


def _follow(session: Session | None) -> None:
    if session is not None:
        session.front = _front
    _front.follow(session)


def start(
    n: int | None = None,
    devices: str | Sequence[str | Device] | None = None,
    *,
    workers: int | None = None,
    ps: int | None = None,
    replicas_per_worker: int | None = None,
    oversubscribe: bool = False,
    hosts: str | Sequence[str] | None = None,
    per_host: int | None = None,
    launcher: str | None = None,
    interface: str | None = None,
    ssh_args: Sequence[str] = (),
    cluster_resolver: ClusterResolver | None = None,
    secret: str | os.PathLike[str] | None = None,
    launcher_args: Sequence[str] = (),
    data_limit: int | str = DATA_LIMIT_NBYTES,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Session:
    """Start engines, on this machine or on others: `%distnb start` does the same.

    Other machines are reached by ssh, without a password, by srun from inside a Slurm allocation, or by mpiexec; they
    have the same Python environment at the same path.
    What notebook and engines say to each other is encrypted and authenticated. What replicas say to each other (the
    rendezvous store; gradients over Gloo or NCCL) is neither: it stays on one network interface of each machine, and
    everyone who can reach that must be trusted.

    Args:
        n: How many. Nothing given: one per GPU, else two on the CPU.
        devices: Their devices, as a sequence or as text with commas ("cuda:0,cuda:1"); with `hosts` those of each.
        workers, ps: In place of `n`, for a ParameterServerStrategy: how many workers, which compute, and how many
            parameter servers, which keep the variables, on the CPU. Workers are the first engines. With `hosts`,
            workers are dealt to the machines in turn, and then servers likewise, each from the first machine on.
        replicas_per_worker: How many engines, and devices, each of these workers has; None for one, or as many as
            `cluster_resolver` tells of accelerators.
        oversubscribe: Let several engines share one device; and let so many start that they crowd their machine: more
            than eight and more than two for each of its cores, or more than its memory takes. What its administrator
            allows (DISTNB_MAX_ENGINES, /etc/distnb/max_engines) holds all the same.
        hosts: The machines where the engines run, as the launcher names them; None for this one, and with
            launcher="slurm" for all nodes of the allocation.
        per_host: How many engines each of them gets. Nothing given: one per GPU, else two on the CPU, or as many as
            Slurm was asked for tasks.
        launcher: "local", "ssh", "slurm" (srun), "mpi" (mpiexec) or "server"; None for what the other arguments say.
        interface: The network interface of this machine, or the address, where it listens for the hosts; None for the
            one that leads to them.
        ssh_args: More arguments for ssh.
        cluster_resolver: Instead of `hosts`: the cluster's chief and workers. Each runs a `distnb.Server`, unless
            `launcher` reaches them otherwise; a SlurmClusterResolver's are reached by srun. What the resolver tells of
            accelerators says how many engines they get. With ps tasks among them, each worker and each ps is a
            server (or a machine, for other launchers) at its own address, and this process is the chief: it
            is the coordinator, and listens nowhere of its own. Servers that do not listen yet are waited for, 60
            seconds or as long as DISTNB_START_TIMEOUT says.
        secret: The secret file (mode 0600) that those servers have too; None for the one that the environment
            variable DISTNB_SECRET_FILE names; where all servers listen on loopback, else one of the user's own.
        launcher_args: More arguments for srun or mpiexec.
        data_limit: Data larger than this, in bytes or as text ("2 GB"), stays on the engines when a cell assigns it:
            it is a handle in the notebook.
        on_progress: Told, in words, how far the start is.

    Returns:
        The session, which `stop` ends; so does the end of this process, however it ends.

    Raises:
        StartError: A cluster runs already, this machine lacks what was asked for, or an engine did not come up.
            Nothing is left behind.
        OptionError: The numbers or names make no sense.
        ContextError: This is a process of multiprocessing, which imports the script.

    Example:
        >>> import distnb
        >>> cluster = distnb.start(2)       # doctest: +SKIP
        >>> cluster = distnb.start(hosts=["gpu1", "gpu2"], per_host=4)       # doctest: +SKIP
        >>> distnb.stop()                   # doctest: +SKIP
    """
    from distnb.cluster.start_options import StartOptions

    options = StartOptions(
        n=n,
        devices=devices,
        workers=workers,
        ps=ps,
        replicas_per_worker=replicas_per_worker,
        oversubscribe=oversubscribe,
        hosts=hosts,
        per_host=per_host,
        launcher=launcher,
        interface=interface,
        ssh_args=ssh_args,
        cluster_resolver=cluster_resolver,
        secret=secret,
        launcher_args=launcher_args,
        data_limit=data_limit,
    )
    return start_with(options, on_progress)


def start_with(options: StartOptions, on_progress: Callable[[str], None] = lambda text: None) -> Session:
    """Start engines with these options: see `start`."""
    global _session
    from distnb.notebook.session import Session
    from distnb.runtime.scripts.main_guard import check_main_guard

    check_main_guard("distnb.start()")
    with _lock:
        running = current()
        if running is not None:
            devices_there = ", ".join(row.device for row in running.status())
            raise StartError(
                f"A cluster is running already ({devices_there}). Use it, "
                "or end it first, and what lives on its engines with it: %distnb stop, or distnb.stop()."
            )
        stop()  # one that was ended by its own method: who follows the session hears of it
        _session = Session.start(options, user_ns=_user_namespace(), on_progress=on_progress)
        _session.namespace.most_nbytes = options.data_limit_nbytes
        atexit.register(stop)
        _register_remote()
        _follow(_session)
        return _session


def stop() -> None:
    """End the cluster and all its processes. Without one it does nothing."""
    global _session
    with _lock:
        session, _session = _session, None
        if session is not None:
            atexit.unregister(stop)
            session.stop()
            _follow(None)


def machines() -> tuple[str, ...]:
    """The other machines of the running cluster, as they were named at its start; empty where there are none."""
    session = current()
    return session.machines() if session is not None else ()


def _user_namespace() -> dict[str, Any]:
    """The variables that the user sees: those of the IPython shell, or of a plain script's main module."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    namespace: dict[str, Any] = shell.user_ns if shell is not None else sys.modules["__main__"].__dict__
    return namespace
