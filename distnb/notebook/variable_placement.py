"""The content of `%distnb variables` and `%distnb check`: the places of variables, and differences between replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distnb.errors import OptionError
from distnb.notebook.handles.handle import HANDLES, RemoteMirrored, RemotePerReplica, RemoteState, state_of_handle
from distnb.notebook.handles.summaries import kind_of
from distnb.values import Mirrored

__all__ = ["COLUMNS", "drift_reports", "variables"]

_WORDS = {"Mirrored": "mirrored", "Sharded": "sharded", "PerReplica": "per replica"}
COLUMNS = ("variable", "kind", "type", "shape", "dtype", "lives on")


def variables(user_ns: Mapping[str, Any], devices: Mapping[int, str]) -> list[tuple[str, ...]]:
    """Return a row for each of the notebook's variables that live on engines. `devices` are the engines' devices."""
    rows = []
    for name, value in list(user_ns.items()):
        # A handle's attributes are on the engines, so only its class identifies it here.
        if name.startswith("_") or type(value) not in HANDLES:
            continue
        state = state_of_handle(value)
        if not state.tracked.ended:
            kind = _WORDS[kind_of(state, mirrored=isinstance(value, Mirrored))]
            rows.append((name, kind, *_described(state, devices)))
    return rows


def _described(state: RemoteState, devices: Mapping[int, str]) -> tuple[str, ...]:
    engines = state.tracked.key.engines
    replicas = [replica for replica in sorted(state.facts) if replica not in state.lost]
    summaries = [state.facts[replica].summary for replica in replicas]
    where = [
        summary.device if ":" in summary.device else devices.get(engines[replica], "")
        for replica, summary in zip(replicas, summaries, strict=True)
    ]
    return (
        _type_name(state),
        " | ".join(dict.fromkeys(summary.shape for summary in summaries if summary.shape)),
        " | ".join(dict.fromkeys(summary.dtype for summary in summaries if summary.dtype)),
        _grouped(where) or "notebook",
    )


def _type_name(state: RemoteState) -> str:
    """Return the name of the object's class, or of the values' class if the components are plain values."""
    values = list(state.local.values())
    return type(values[0]).__name__ if values and state.type_name == "object" else state.type_name.rsplit(".", 1)[-1]


def _grouped(devices: list[str]) -> str:
    """Return the devices as text: `cpu:0 ×2`, or `cuda:0, cuda:1`."""
    counts = {device: devices.count(device) for device in devices}
    return ", ".join(device if count == 1 else f"{device} ×{count}" for device, count in counts.items())


def drift_reports(user_ns: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, str]:
    """Compare the components of variables on the engines, and return the findings by name.

    Without `names` compare all mirrored variables.

    Raises:
        OptionError: A name does not belong to a variable on engines.
    """
    for name in names:
        if type(user_ns.get(name)) not in HANDLES:
            what = "is not a variable" if name not in user_ns else "lives in the notebook, where it is one object"
            raise OptionError(f"`{name}` {what}. %distnb variables lists what lives on the engines.")
    mirrored = [
        name
        for name, value in user_ns.items()
        if isinstance(value, RemoteMirrored) and not name.startswith("_") and not state_of_handle(value).tracked.ended
    ]
    return {name: _report(user_ns[name]) for name in names or mirrored}


def _report(handle: Any) -> str:
    if isinstance(handle, RemotePerReplica):
        return "a PerReplica: each replica has a value of its own, and they need not be equal."
    text: str = state_of_handle(handle).operations.run(handle, "check")
    return text
