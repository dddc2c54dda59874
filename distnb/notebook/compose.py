"""The composition of the notebook's parts: the session, the front end that shows it, and the strategies' runtime."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distnb.errors import NoClusterError, StartError
from distnb.notebook.front_end import FrontEnd
from distnb.options import DATA_LIMIT_NBYTES

if TYPE_CHECKING:
    from distnb.cluster.start_options import Elsewhere, StartOptions
    from distnb.notebook.session import Session
    from distnb.runtime.base import Owner
    from distnb.topology import Device
    from distnb.views.runs import History

__all__ = [
    "attach",
    "connect",
    "current",
    "disconnect",
    "history",
    "lost",
    "machines",
    "require",
    "settled",
    "start",
    "start_with",
    "stop",
]


_front = FrontEnd()
_session: Session | None = None
_lock = threading.RLock()


def current() -> Session | None:
    """Return the running session, or None."""
    return _session if _session is not None and _session.alive else None


def settled(on_wait: Callable[[], None]) -> Session | None:
    """Return the running session, or None, once no other thread is starting or stopping engines.

    Args:
        on_wait: Called once if another thread is.
    """
    if not _lock.acquire(blocking=False):
        on_wait()
        _lock.acquire()
    try:
        return current()
    finally:
        _lock.release()


def require() -> Session:
    """Return the running session.

    Raises:
        NoClusterError: No cluster is running.
    """
    session = current()
    if session is None:
        raise NoClusterError(lost() or "No cluster is running. Start one with %distnb start -n 2, or distnb.start(2).")
    return session


def lost() -> str:
    """Return the reason, with its cure, why the notebook has no cluster although it was not stopped here, or ""."""
    return _session.lost if _session is not None else ""


def history() -> History | None:
    """Return the runs that the front end drew, or None without a front end."""
    return _front.history


def attach(front: FrontEnd) -> None:
    """Show the session in a front end from now on."""
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
    """Make strategies of several replicas run on the session, or on a session that the front end starts for them."""
    from distnb.notebook.remote_runtime import Remote
    from distnb.runtime.this_process import this_process

    remotes: dict[Owner, Remote] = {}

    def remote(strategy: Owner) -> Remote:
        if strategy not in remotes:
            remotes[strategy] = Remote(strategy, lambda: _front.session_for(strategy) or require())
        return remotes[strategy]

    this_process.remote = remote
    this_process.machines = machines


def _follow(session: Session | None) -> None:
    if session is not None:
        session.front = _front
    _front.follow(session)


def start(
    n: int | None = None,
    devices: str | Sequence[str | Device] | None = None,
    *,
    on: Elsewhere | None = None,
    workers: int | None = None,
    ps: int | None = None,
    replicas_per_worker: int | None = None,
    oversubscribe: bool = False,
    detach: bool = False,
    name: str | None = None,
    hours: float | None = None,
    on_disconnect: str | None = None,
    sync: bool | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = False,
    data_limit: int | str = DATA_LIMIT_NBYTES,
    idle_timeout: float | str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Session:
    """Start engines, on this machine or on others: `%distnb start` does the same.

    Other machines are reached by ssh without a password, by srun from inside a Slurm allocation, or by mpiexec. They
    need the same Python environment at the same path. A notice reports packages that are missing there, or have another
    version, before the first program that needs them.
    The messages between notebook and engines are encrypted and authenticated. The messages between replicas (the
    rendezvous store; gradients over Gloo or NCCL) are neither: they stay on one network interface of each machine, and
    you must trust everyone who can reach that interface.

    Args:
        n: The number of engines. By default one per GPU, or two on the CPU without GPUs.
        devices: The engines' devices, as a sequence or as text with commas ("cuda:0,cuda:1"). With `on`, the devices of
            each machine.
        on: The other machines that run the engines: `distnb.SSH([…])`, `distnb.Slurm()`, `distnb.MPI([…])`,
            `distnb.Servers(…)`, `distnb.Ray()` or `distnb.IPythonParallel(…)`. None for this machine.
        workers, ps: The numbers of workers and of parameter servers for a ParameterServerStrategy, in place of `n`.
            Workers compute, and parameter servers keep the variables, on the CPU. The workers are the first engines.
            With `on`, the workers are assigned to the machines in turn, beginning with the first machine, and then
            the servers in the same way.
        replicas_per_worker: The number of engines, and of devices, of each worker. None for one, or for the number of
            accelerators that a cluster resolver in `on` reports.
        oversubscribe: Whether several engines may share one device, and whether a machine may have more engines than it
            can hold: more than eight and more than two per core, or more than fit in its memory. The limit of the
            machine's administrator (DISTNB_MAX_ENGINES, /etc/distnb/max_engines) applies in any case.
        detach: Whether the engines stay when this process ends, until `distnb.stop()`, `distnb stop NAME` in a
            terminal, or their time limit. `distnb.connect` continues with them. Not for parameter servers.
        name: The name of a detached cluster. None for "cluster-1", "cluster-2", …
        hours: The time limit of a detached cluster, in hours; inf for none. None for 8.
        on_disconnect: What happens to a cell that runs when this process ends: "continue" (the default) or "end".
        sync: The folders whose modules are sent to engines on other machines: True for the notebook's own folder, or
            paths, as a sequence or as text with commas. Their Python files and packages are sent before the first
            program, and again when they have changed. Engines on this machine import modules from the notebook's own
            files in any case.
        data_limit: The size, in bytes or as text ("2 GB"), above which data that a cell assigns stays on the engines.
            The notebook then has a handle of it.
        idle_timeout: The time without any use, in seconds or as text ("20m"), after which the engines end. The notebook
            then keeps a copy of what is mirrored, and `restart()` starts the engines again with it. None for no limit.
        on_progress: Called with a text whenever the start makes progress.

    Returns:
        The session. It ends when `stop` is called, or when this process ends for any reason. Detached engines do not
        end with this process.

    Raises:
        StartError: A cluster runs already, this machine lacks something that was requested, or an engine did not start.
            No process is left behind.
        OptionError: The numbers or names are invalid.
        ContextError: This process was started by multiprocessing, and is importing the script.

    Example:
        >>> import distnb
        >>> cluster = distnb.start(2)       # doctest: +SKIP
        >>> cluster = distnb.start(8, on=distnb.SSH(["gpu1", "gpu2"]))       # doctest: +SKIP
        >>> distnb.stop()                   # doctest: +SKIP
    """
    from distnb.cluster.start_options import StartOptions

    options = StartOptions(
        n=n,
        devices=devices,
        on=on,
        workers=workers,
        ps=ps,
        replicas_per_worker=replicas_per_worker,
        oversubscribe=oversubscribe,
        detach=detach,
        name=name,
        hours=hours,
        on_disconnect=on_disconnect,
        sync=sync,
        data_limit=data_limit,
        idle_timeout=idle_timeout,
    )
    return start_with(options, on_progress)


def start_with(options: StartOptions, on_progress: Callable[[str], None] = lambda text: None) -> Session:
    """Start engines with these options. See `start`."""
    global _session
    from distnb.notebook.session import Session
    from distnb.runtime.scripts.main_guard import check_main_guard

    check_main_guard("distnb.start()")
    with _lock:
        _check_none_is_running()
        _session = Session.start(options, user_ns=_user_namespace(), on_progress=on_progress)
        _session.namespace.most_nbytes = options.data_limit_nbytes
        _use(_session)
        return _session


def _check_none_is_running() -> None:
    running = current()
    if running is not None:
        devices_there = ", ".join(row.device for row in running.status())
        raise StartError(
            f"A cluster is running already ({devices_there}). Use it, or stop it first, which also discards the "
            "variables on its engines: %distnb stop, or distnb.stop()."
        )
    stop()  # notifies the followers of a session that was ended by its own `stop`


def _use(session: Session) -> None:
    atexit.register(_leave)
    _register_remote()
    _follow(session)


def connect(name: str, *, take: bool = False, on_progress: Callable[[str], None] = lambda text: None) -> Session:
    """Connect to a detached cluster: `%distnb connect` does the same.

    The engines keep everything when a notebook ends: models, optimizers, datasets, random states. Names that the
    earlier notebook had bound to objects on the engines are bound here to new handles, and data that the engines have
    is fetched. The names are listed, and those that could not be restored. Names that this notebook has already are not
    changed.
    If a cell was running when the earlier notebook ended, its output is shown, and this function waits for its end.

    Args:
        name: The name of the cluster; `distnb list` in a terminal shows the names.
        take: Whether to take the cluster over from another notebook that is connected.
        on_progress: Called with a text whenever there is progress.

    Returns:
        The session.

    Raises:
        NoClusterError: No detached cluster of this name runs on this machine.
        ClusterError: Another notebook is connected, or an engine does not answer.
        StartError: This notebook has a cluster already.

    Example:
        >>> import distnb
        >>> cluster = distnb.start(2, detach=True, name="exp1")      # doctest: +SKIP
        >>> # ... in another notebook, or after a restart of the kernel:
        >>> cluster = distnb.connect("exp1")                         # doctest: +SKIP
    """
    global _session
    from distnb.notebook.session import Session
    from distnb.runtime.scripts.main_guard import check_main_guard

    check_main_guard("distnb.connect()")
    with _lock:
        _check_none_is_running()
        _session, restored = Session.connect(
            name, user_ns=_user_namespace(), take=take, on_progress=on_progress, follow=_follow
        )
        _use(_session)
        print(restored)
        return _session


def disconnect() -> None:
    """Leave the engines of a detached cluster to the next notebook. The end of this process does the same.

    Raises:
        OptionError: The engines end with this notebook.
        NoClusterError: No cluster is running.
    """
    with _lock:
        session = require()
        session.engines.save_names()
        session.disconnect()
        atexit.unregister(_leave)
        _follow(None)


def _leave() -> None:
    """Leave a detached cluster, and stop any other, when this process ends."""
    session = current()
    if session is not None and session.name:
        disconnect()
    else:
        stop()


def stop() -> None:
    """End the cluster and all its processes. Do nothing if there is no cluster."""
    global _session
    with _lock:
        session, _session = _session, None
        if session is not None:
            atexit.unregister(_leave)
            session.stop()
            _follow(None)


def machines() -> tuple[str, ...]:
    """Return the other machines of the running cluster, as they were named at its start; () if there are none."""
    session = current()
    return session.engines.hosts() if session is not None else ()


def _user_namespace() -> dict[str, Any]:
    """Return the namespace of the user: that of the IPython shell, or of a plain script's main module."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    namespace: dict[str, Any] = shell.user_ns if shell is not None else sys.modules["__main__"].__dict__
    return namespace
