"""The names in tf.distribute, including older versions, with distnb's names for them: one table for each place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distnb.errors import UnknownNameError

__all__ = ["METHODS", "NAMES", "experimental"]

METHODS = {
    "experimental_distribute_dataset": "distribute_dataset",
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    "experimental_distribute_values_from_function": "distribute_values_from_function",
    "experimental_local_results": "local_results",
    "experimental_run": "run",
    "experimental_run_v2": "run",
    "unwrap": "local_results",
}
"""Methods of `Strategy`."""

NAMES = {"experimental_set_strategy": "set_strategy"}
"""Names in `distnb`."""

_EXPERIMENTAL = {
    name: name
    for name in (
        "AutoShardPolicy",
        "CentralStorageStrategy",
        "CommunicationImplementation",
        "CommunicationOptions",
        "MultiWorkerMirroredStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
        "ValueContext",
        "coordinator",
        "partitioners",
        "set_strategy",
    )
} | {"CollectiveCommunication": "CommunicationImplementation", "CollectiveHints": "CommunicationOptions"}
"""Names in `distnb.experimental`, and in `distnb`."""

_PREEMPTION = (
    "distnb does not watch for preemption. Save every few minutes by a CheckpointManager (save(wait=False) costs a "
    "copy), call restore_or_initialize() at the beginning, and have the job started again: docs/limits.md."
)
_ABSENT = {
    "PreemptionCheckpointHandler": _PREEMPTION,
    "PreemptionWatcher": _PREEMPTION,
    "TerminationConfig": _PREEMPTION,
    "rpc": "Schedule functions on workers by distnb.coordinator.ClusterCoordinator.",
}
"""Names of tf.distribute.experimental that have no counterpart, and the cure."""


class _Experimental(SimpleNamespace):
    """`distnb.experimental`: tf.distribute's names for parts that have left its experimental stage."""

    def __getattr__(self, name: str) -> Any:
        import distnb

        if name in _EXPERIMENTAL:
            return getattr(distnb, _EXPERIMENTAL[name])
        cure = _ABSENT.get(name, f"It has {', '.join(sorted(_EXPERIMENTAL))}.")
        raise UnknownNameError("distnb.experimental", name, _EXPERIMENTAL, cure)

    def __dir__(self) -> list[str]:
        return sorted(_EXPERIMENTAL)


experimental = _Experimental()
