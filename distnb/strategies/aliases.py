"""The names of tf.distribute and of older versions of it, and what they are called here: one table for each place."""

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


class _Experimental(SimpleNamespace):
    """`distnb.experimental`: tf.distribute's names for what has left its experimental stage."""

    def __getattr__(self, name: str) -> Any:
        import distnb

        if name in _EXPERIMENTAL:
            return getattr(distnb, _EXPERIMENTAL[name])
        raise UnknownNameError(
            "distnb.experimental", name, _EXPERIMENTAL, f"It has {', '.join(sorted(_EXPERIMENTAL))}."
        )

    def __dir__(self) -> list[str]:
        return sorted(_EXPERIMENTAL)


experimental = _Experimental()
