"""The choice of a strategy's runtime in this process. Loads torch only if there are replicas."""

from __future__ import annotations

import os
import sys

from distnb.errors import NoClusterError, OptionError
from distnb.runtime.base import Owner, Runtime
from distnb.runtime.in_process import InProcess
from distnb.runtime.scripts.main_guard import check_main_guard
from distnb.runtime.this_process import this_process

__all__ = ["in_process", "join_launched", "on_replicas", "started_by_launcher"]

_in_process: dict[Owner, InProcess] = {}
_checked: dict[Owner, tuple[object, ...]] = {}  # by strategy: the team's devices in its last check


def started_by_launcher() -> bool:
    """Return whether torchrun, `distnb run` or a similar launcher started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def in_process(strategy: Owner, device: str | None) -> InProcess:
    """Return the runtime of a strategy whose only replica is this process. `device` may be None: no specific device."""
    if strategy not in _in_process:
        _in_process[strategy] = InProcess(strategy, device)
    return _in_process[strategy]


def on_replicas(strategy: Owner) -> Runtime:
    """Return the runtime of a strategy with several replicas: this replica's, or in a notebook one that uses engines.

    Raises:
        NoClusterError: This process is a script that was started alone.
        OptionError: The strategy was made for other devices than the replicas have.
        ContextError: This process was started by multiprocessing and imports the script.
    """
    process = this_process.replica
    if process is not None:
        if _checked.get(strategy) != process.team.devices:
            _check_team(strategy, tuple(map(str, process.team.devices)), process.uses_nccl, process.workers)
            _checked[strategy] = process.team.devices
        return process.runtime_of(strategy)
    if this_process.remote is not None:
        return this_process.remote(strategy)
    check_main_guard(repr(strategy))
    return strategy.join() or on_replicas(strategy)


def join_launched(strategy: Owner) -> None:
    """Make this process the replica that its launcher's environment describes.

    Raises:
        NoClusterError: No launcher started this process.
    """
    if not started_by_launcher():
        raise NoClusterError(
            f"{strategy!r} needs several replicas, and this process was started alone. Start the script on each of "
            f"them: `distnb run {_script()} -n 2` (torchrun works too). In a notebook, %load_ext distnb and %distnb "
            "start give engines; in a plain script, distnb.start() does."
        )
    from distnb.runtime.spmd import join_from_env

    join_from_env()


def _script() -> str:
    name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    return name if name.endswith(".py") else "script.py"


def _check_team(strategy: Owner, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...]) -> None:
    strategy.check_honoured(devices, nccl, workers)
    spec, kind = strategy.spec, strategy.device_type
    if kind and not all(name.startswith(f"{kind}:") for name in devices):
        raise OptionError(
            f"{strategy!r} needs replicas on {kind} devices, and this program's run on {', '.join(devices)}. "
            f"Start it on those: `distnb run --devices {kind} {_script()}`."
        )
    wanted = len(spec.devices) or spec.num_replicas or len(devices)
    if wanted != len(devices) or (spec.devices and spec.devices != devices):
        asked = ", ".join(spec.devices) or f"{wanted} replicas"
        raise OptionError(
            f"{strategy!r} was made for {asked}, and this program runs on {len(devices)} replica(s): "
            f"{', '.join(devices)}. Create it without devices to use the program's, or start the program on the named "
            "devices."
        )
