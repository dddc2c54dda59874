"""Private names of Accelerate: the state that its objects in a process share. Importing this loads no Accelerate."""

from __future__ import annotations

import sys
from typing import Any, Final

from distnb.compat.versions import private_names

__all__ = ["BOUND", "STATE", "renew", "without_mark"]

BOUND: Final = {
    ("accelerate.accelerator", "Accelerator"),
    ("accelerate.data_loader", "DataLoaderStateMixin"),
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("accelerate.scheduler", "AcceleratedScheduler"),
    ("accelerate.state", "AcceleratorState"),
    ("accelerate.state", "GradientState"),
    ("accelerate.state", "PartialState"),
}
"""Classes whose instances store the number of processes at their creation: (module, name)."""

STATE: Final = "accelerate.state"
"""The module that stores the number of processes."""

_MARK = "_is_accelerate_prepared"
_former: dict[tuple[int, int], list[dict[str, Any]]] = {}


def renew(size: int, rank: int) -> None:
    """Make Accelerate detect the processes of the current program, unless it knows them already.

    All `Accelerator`s of a process share the state of the first one. That state is stored, and restored for the next
    program with as many processes, so that its `Accelerator`s work again.
    """
    loaded = sys.modules.get(STATE)
    if loaded is None:
        return
    with private_names("accelerate"):
        shared = [loaded.PartialState._shared_state, loaded.AcceleratorState._shared_state]
    known = (shared[0].get("num_processes", size), shared[0].get("process_index", rank))
    if known != (size, rank):
        _former[known] = [dict(state) for state in shared]
        for state in shared:
            state.clear()  # in place: the instances' attributes are in it
    if not shared[0]:
        for state, former in zip(shared, _former.pop((size, rank), ()), strict=False):
            state.update(former)


def without_mark(reduced: Any) -> Any:
    """Return an object's reduction without Accelerate's mark on models that are prepared for this process."""
    if type(reduced) is tuple and len(reduced) > 2 and type(reduced[2]) is dict and _MARK in reduced[2]:
        state = {name: value for name, value in reduced[2].items() if name != _MARK}
        return (*reduced[:2], state, *reduced[3:])
    return reduced
