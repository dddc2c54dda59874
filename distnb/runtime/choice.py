"""Which of the runtimes a strategy has in this process. Loads torch only where there are replicas."""

from __future__ import annotations

import os
import sys

from distnb.errors import NoClusterError, OptionError
from distnb.options import StrategySpec
from distnb.runtime.base import PARAMETER_SERVER, Owner, Runtime, is_in_process
from distnb.runtime.central import setup
from distnb.runtime.in_process import InProcess
from distnb.runtime.scripts.main_guard import check_main_guard
from distnb.runtime.this_process import this_process

__all__ = ["check_honoured", "runtime_for", "started_by_launcher"]

_MULTI_WORKER = "multi_worker"
_CHECKED_KINDS = (_MULTI_WORKER, setup.KIND)

_in_process: dict[Owner, InProcess] = {}
_checked: set[tuple[Owner, tuple[object, ...]]] = set()


def started_by_launcher() -> bool:
    """Whether torchrun, `distnb run` or the like started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def runtime_for(strategy: Owner) -> Runtime:
    """Where a strategy runs from here.

    Raises:
        NoClusterError: It needs several replicas, and this is a script that was started alone.
        OptionError: It was made for other devices than the replicas have.
        ContextError: This is a process of multiprocessing, which imports the script.
    """
    spec = strategy.spec
    if is_in_process(spec):
        return _alone_on(strategy, spec.devices[0] if spec.devices else None)
    if spec.kind == PARAMETER_SERVER:
        from distnb.runtime.servers.roles import runtime_of

        return runtime_of(strategy)
    process = this_process.replica
    if process is not None:
        if spec.kind in _CHECKED_KINDS or spec.devices or spec.num_replicas or spec.options or spec.device_type:
            _check_team(strategy, process.team.devices, process.uses_nccl, process.workers)
        return process.runtime_of(strategy)
    if this_process.remote is not None:
        return this_process.remote(strategy)
    check_main_guard(repr(strategy))
    if spec.kind == _MULTI_WORKER:
        from distnb.runtime.scripts import script_worker

        device = script_worker.enter(spec, started_by_launcher())
        return runtime_for(strategy) if device is None else _alone_on(strategy, device)
    if started_by_launcher():
        from distnb.runtime.spmd import join_from_env

        join_from_env()
        return runtime_for(strategy)
    raise NoClusterError(
        f"{strategy!r} needs several replicas, and this process was started alone. Start the script on each of them: "
        f"`distnb run {_script()} -n 2` (torchrun works too). In a notebook, %load_ext distnb and %distnb start give "
        "engines; in a plain script, distnb.start() does."
    )


def check_honoured(spec: StrategySpec, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
    """Raise OptionError if replicas on these devices, of these machines, cannot communicate as a strategy asks."""
    if spec.kind == _MULTI_WORKER:
        from distnb.runtime.scripts import script_worker

        script_worker.check_communication(spec, devices, nccl)
    if spec.kind == setup.KIND:
        setup.check_places(spec, devices, workers)
    ops = spec.option("cross_device_ops")
    if ops is not None:
        ops.check(devices, nccl)


def _alone_on(strategy: Owner, device: str | None) -> InProcess:
    if strategy not in _in_process:
        _in_process[strategy] = InProcess(strategy, device)
    return _in_process[strategy]


def _script() -> str:
    name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    return name if name.endswith(".py") else "script.py"


def _check_team(strategy: Owner, devices: tuple[object, ...], nccl: bool, workers: tuple[int, ...]) -> None:
    key = (strategy, devices)
    if key in _checked:
        return
    spec, there = strategy.spec, tuple(map(str, devices))
    check_honoured(spec, there, nccl, workers)
    wrong = [name for name in there if spec.device_type and not name.startswith(f"{spec.device_type}:")]
    if wrong:
        raise OptionError(
            f"{strategy!r} needs replicas on {spec.device_type} devices, and this program's run on {', '.join(there)}. "
            f"Start it on those: `distnb run --devices {spec.device_type} {_script()}`."
        )
    wanted = len(spec.devices) or spec.num_replicas or len(there)
    if wanted != len(there) or (spec.devices and spec.devices != there):
        asked = ", ".join(spec.devices) or f"{wanted} replicas"
        raise OptionError(
            f"{strategy!r} was made for {asked}, and this program runs on {len(there)} replica(s): {', '.join(there)}. "
            "Make it without devices to take those that the program has, or start the program on the devices that it "
            "names."
        )
    _checked.add(key)
