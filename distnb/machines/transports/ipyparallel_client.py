"""The notebook as a client of an existing ipyparallel cluster: its connection, and its requests to the engines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from distnb import __version__
from distnb.errors import OptionError, StartError

__all__ = ["EngineRequests", "check_cluster", "connected"]

_ENGINE_MODULE = "distnb.machines.transports.ipyparallel_engine"
_CONNECT_S = 10.0
_POLL_S = 0.5


def check_cluster(cluster: Any) -> None:
    """Raise OptionError if an object does not name an ipyparallel cluster."""
    if isinstance(cluster, str | os.PathLike):
        return
    import ipyparallel

    if not isinstance(cluster, ipyparallel.Cluster | ipyparallel.Client):
        raise OptionError(
            f"cluster={cluster!r} is not an ipyparallel cluster. Give an ipyparallel.Cluster or Client, the name of "
            "an IPython profile, or the path of an ipcontroller-client.json."
        )


@contextmanager
def connected(cluster: Any) -> Iterator[Any]:
    """Open a client of the cluster for a `with` block, or use the given one."""
    import ipyparallel

    if isinstance(cluster, ipyparallel.Client):
        yield cluster
        return

    class Client(ipyparallel.Client):  # type: ignore[misc]
        def activate(self, targets: Any = "all", suffix: str = "") -> None:
            """Leave `%px` to the user's clients. ipyparallel calls this for the first client of a notebook."""

    path = _connection_file(cluster)
    try:
        # The engines must reach the notebook, so a tunnel would not help.
        client = Client({**json.loads(path.read_text()), "ssh": ""}, timeout=_CONNECT_S)
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(
            f"{path} is not a connection file for ipyparallel's clients ({error!r}). Give an ipcontroller-client.json."
        ) from error
    except (OSError, zmq.ZMQError) as error:
        raise StartError(
            f"No ipyparallel controller answers at the address in {path}: {error}. A cluster that has ended may leave "
            "its file behind. Start the cluster (`ipcluster start`), or name another one. If it runs: this machine "
            "must reach its controller without ssh."
        ) from error
    try:
        yield client
    finally:
        client.close()


def _connection_file(cluster: Any) -> Path:
    """Return the connection file for clients of a cluster that `check_cluster` has accepted."""
    from IPython.paths import get_ipython_dir

    if not isinstance(cluster, str | os.PathLike):
        folder, name = Path(cluster.profile_dir, "security"), f"ipcontroller-{cluster.cluster_id}-client.json"
    elif (named := os.fspath(cluster)).endswith(".json") or os.sep in named:
        folder, name = Path(named).expanduser().parent, Path(named).name
    else:  # the file of a cluster that `ipyparallel.Cluster` has started has the cluster's id in its name
        folder, name = Path(get_ipython_dir(), f"profile_{named}", "security"), "ipcontroller-*client.json"
    found = sorted(folder.glob(name))
    if len(found) == 1:
        return found[0]
    if found:
        raise StartError(f"Several ipyparallel clusters are there. Name the file of one: {', '.join(map(str, found))}.")
    raise StartError(
        f"No ipyparallel cluster is running there: {folder} has no {name}. Start one (`ipcluster start`), name its "
        "profile, or give the path of its ipcontroller-client.json, copied here if the profile is on another machine."
    )


class EngineRequests:
    """The requests to ipyparallel engines, through one client.

    Each is a text for `eval`, which needs no distnb in the engine and no equal version of Python to be opened there.
    ipyparallel runs it in the main thread, after the tasks before it.
    """

    def __init__(self, client: Any, on_progress: Callable[[str], None]) -> None:
        self.client = client
        self.on_progress = on_progress

    def wait_for_engines(self, least: int, wait_s: float | None) -> list[int]:
        """Return the numbers of the cluster's engines when there are enough of them."""
        begin = time.monotonic()
        while len(engines := sorted(self.client.ids)) < least:
            waited_s = time.monotonic() - begin
            if waited_s > (wait_s or 0.0):
                raise StartError(
                    f"The ipyparallel cluster has the engines ({_list(engines)}), but {least} are needed. Start more "
                    "(`ipcluster engines -n 2`), or wait for those in a batch system's queue: --wait 600, or wait=600."
                )
            self.on_progress(f"waiting for ipyparallel's engines: {len(engines)} of {least} ({waited_s:.0f} s)")
            time.sleep(_POLL_S)
        return engines

    def send(
        self, engines: Sequence[int], call: str, values: Mapping[str, Any], patience_s: float
    ) -> dict[int, dict[str, Any]]:
        """Call a function of `ipyparallel_engine` in these engines, and return the results by engine.

        Raises:
            StartError: An engine is busy, has ended, or has no distnb.
        """
        text = f"__import__('importlib').import_module({_ENGINE_MODULE!r}).{call}"
        try:
            results = {engine: self.client[engine].apply_async(eval, text, dict(values)) for engine in engines}
        except (RuntimeError, OSError, IndexError) as error:
            raise StartError(f"ipyparallel's engines cannot be reached: {error}. Use a new client.") from error
        begin = time.monotonic()
        while waiting := [engine for engine, result in results.items() if not result.ready()]:
            waited_s = time.monotonic() - begin
            if waited_s > patience_s:
                raise StartError(
                    f"ipyparallel's engine {_list(waiting)} did not answer within {patience_s:.0f} s. Another task may "
                    "be running there, or the machine was lost. End the task, or wait for it: --wait 600, or wait=600."
                )
            self.on_progress(f"waiting for ipyparallel's engines {_list(waiting)} ({waited_s:.0f} s)")
            results[waiting[0]].wait(_POLL_S)
        return {engine: _value(engine, result) for engine, result in results.items()}


def _value(engine: int, result: Any) -> dict[str, Any]:
    from ipyparallel.error import IPythonError

    try:
        return dict(result.get())
    except IPythonError as error:
        name, said = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
    if name in ("ImportError", "ModuleNotFoundError"):
        raise StartError(
            f"ipyparallel's engine {engine} has no distnb {__version__} ({said}). Its machine needs the same Python "
            "environment as the notebook's."
        )
    raise StartError(f"ipyparallel's engine {engine} raised {name}: {said}")


def _list(engines: Iterable[int]) -> str:
    return ", ".join(map(str, engines))
