"""The notebook as a client of an existing ipyparallel cluster: its connection, and its requests to the engines."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from distnb import __version__
from distnb.errors import OptionError, StartError

__all__ = ["EngineRequests", "check_cluster", "connected"]

_ENGINE_MODULE = "distnb.machines.transports.ipyparallel_engine"
_CONNECT_S = 10.0
_ABORT_S = 2.0
_PLACE_S = 30.0
_POLL_S = 0.5
_KEYS = ("interface", "registration", "notification", "key", "pack", "unpack", "signature_scheme", "task_scheme")


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

    info, source = _connection_info(cluster)
    where = f"{info['interface']}:{info['registration']}"
    try:
        client = Client(info, timeout=_CONNECT_S)
    except (TimeoutError, OSError, zmq.ZMQError) as error:
        raise StartError(
            f"No ipyparallel controller answers at {where} ({error}), the address in {source}. A cluster that has "
            "ended may leave its file behind. Start the cluster (`ipcluster start`), or name another one. If it runs: "
            "this machine must reach its controller without ssh."
        ) from error
    try:
        yield client
    finally:
        client.close()


def _connection_info(cluster: Any) -> tuple[dict[str, Any], str]:
    """Return the connection information for clients, and its source in words."""
    if isinstance(cluster, str | os.PathLike):
        path = _connection_file(os.fspath(cluster))
        try:
            info, source = json.loads(path.read_text()), _dated(path)
        except (OSError, ValueError) as error:
            raise StartError(f"The connection file {path} cannot be read: {error}.") from error
    else:
        info, source = _controllers_information(cluster), repr(cluster)
    missing = [name for name in _KEYS if name not in info] if isinstance(info, dict) else ["interface"]
    if missing:
        raise StartError(
            f"{source} is not a connection file for ipyparallel's clients: it has no {missing[0]!r}. Give an "
            "ipcontroller-client.json."
        )
    return {**info, "ssh": ""}, source  # the engines must reach the notebook, so a tunnel does not help


def _controllers_information(cluster: Any) -> Any:
    if cluster.controller is None:
        raise StartError(f"{cluster!r} is not running. Start it first: cluster.start_cluster_sync(n=2).")
    information = cluster.controller.get_connection_info(timeout=_CONNECT_S)
    try:
        if inspect.isawaitable(information):
            # This thread may be running an event loop, as in a notebook.
            with ThreadPoolExecutor(1) as executor:
                information = executor.submit(asyncio.run, information).result()  # type: ignore[arg-type]
        return information["client"]
    except (OSError, TimeoutError) as error:
        raise StartError(f"The controller of {cluster!r} does not answer: {error}. Has the cluster ended?") from error


def _connection_file(named: str) -> Path:
    """Return the connection file for clients that a path or the name of an IPython profile names."""
    if named.endswith(".json") or os.sep in named:
        path = Path(named).expanduser()
        if path.is_file():
            return path
        raise StartError(
            f"There is no connection file {path}. A running ipyparallel cluster has one in the folder `security` of "
            "its profile; on another machine, copy it here (mode 0600)."
        )
    from IPython.core.profiledir import ProfileDir, ProfileDirError
    from IPython.paths import get_ipython_dir

    try:
        folder = Path(ProfileDir.find_profile_dir_by_name(get_ipython_dir(), named).security_dir)
    except ProfileDirError:
        profiles = sorted(path.name.removeprefix("profile_") for path in Path(get_ipython_dir()).glob("profile_*"))
        raise StartError(
            f"There is no IPython profile {named!r} in {get_ipython_dir()}, which has {', '.join(profiles) or 'none'}. "
            "Give one of these, or the path of the cluster's ipcontroller-client.json."
        ) from None
    # The first name is ipcluster's; a cluster that was started by ipyparallel.Cluster also has its id in the name.
    usual, others = folder / "ipcontroller-client.json", sorted(folder.glob("ipcontroller-*-client.json"))
    found = [usual] if usual.exists() else others
    if len(found) == 1:
        return found[0]
    if found:
        raise StartError(
            f"Several ipyparallel clusters have the profile {named!r}. Name the connection file of one: "
            f"{', '.join(map(_dated, found))}."
        )
    raise StartError(
        f"No ipyparallel cluster with the profile {named!r} is running: {folder} has no ipcontroller-client.json. "
        f"Start one: `ipcluster start --profile={named} -n 4`."
    )


def _dated(path: Path) -> str:
    return f"{path} (of {time.strftime('%Y-%m-%d %H:%M', time.localtime(path.stat().st_mtime))})"


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
                found = f"{len(engines)} engine{'s' * (len(engines) != 1)} ({_list(engines)}), but {least} are needed"
                raise StartError(
                    f"The ipyparallel cluster has {found if engines else 'no engines'}. Start more (`ipcluster engines "
                    "-n 2`), or wait for those in a batch system's queue: --wait 600, or wait=600."
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
        results = self._evaluate(engines, text, values, patience_s)
        return {engine: self._value(engine, result) for engine, result in results.items()}

    def _evaluate(
        self, engines: Sequence[int], text: str, values: Mapping[str, Any], patience_s: float
    ) -> dict[int, Any]:
        try:
            results = {engine: self.client[engine].apply_async(eval, text, dict(values)) for engine in engines}
        except (RuntimeError, OSError) as error:
            raise StartError(f"This ipyparallel.Client cannot be used: {error}. Make a new one.") from error
        except IndexError as error:
            raise StartError(f"An ipyparallel engine has just ended: {error}. Start again with the others.") from error
        begin = time.monotonic()
        try:
            while waiting := [engine for engine, result in results.items() if not result.ready()]:
                waited_s = time.monotonic() - begin
                if waited_s > patience_s:
                    which = f"engine {waiting[0]}" if len(waiting) == 1 else f"engines {_list(waiting)}"
                    raise StartError(
                        f"ipyparallel's {which} did not answer within {patience_s:.0f} s. Another task may be running "
                        "there, or the machine was lost. End the task, or wait for it: --wait 600, or wait=600."
                    )
                self.on_progress(f"waiting for ipyparallel's engines {_list(waiting)} ({waited_s:.0f} s)")
                results[waiting[0]].wait(_POLL_S)
        finally:
            self._abort(results)
        return results

    def _abort(self, results: Mapping[int, Any]) -> None:
        """Remove requests that have not begun from the engines' queues."""
        aborts = []
        for engine, result in results.items():
            if not result.ready() and engine in self.client.ids:
                aborts.append(self.client.abort(result, targets=engine, block=False))
        for abort in aborts:
            with suppress(TimeoutError):
                abort.result(_ABORT_S)

    def _value(self, engine: int, result: Any) -> dict[str, Any]:
        from ipyparallel.error import IPythonError

        try:
            return dict(result.get())
        except IPythonError as error:
            name, said = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
        if name == "EngineError":
            raise StartError(f"ipyparallel's engine {engine} has ended. Start the cluster's engines again.")
        if name in ("ImportError", "ModuleNotFoundError"):
            place = self._evaluate([engine], "__import__('sys').executable", {}, _PLACE_S)[engine].get()
            raise StartError(
                f"ipyparallel's engine {engine} has no distnb {__version__} at {place} ({said}). Its machine needs the "
                "same Python environment as the notebook's."
            )
        raise StartError(f"ipyparallel's engine {engine} raised {name}: {said}")


def _list(engines: Iterable[int]) -> str:
    return ", ".join(map(str, engines))
