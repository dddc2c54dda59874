"""The texts and the models by which handles are shown."""

from __future__ import annotations

from distnb.notebook.handles.state import RemoteState, state_of_handle
from distnb.values import DistributedValues, Mirrored
from distnb.views.value_model import ValueModel
from distnb.wire.value_facts import Inspected

__all__ = ["as_model", "as_text", "kind_of"]

_UNASSIGNED = "<unassigned>"
_LOST = "<lost: its engine has ended>"
_EARLIER = " as last seen (an engine is stuck: %distnb status)"


def as_text(state: RemoteState, size: int, *, mirrored: bool, fresh: bool = True) -> str:
    """Return the repr of a handle: one line for a mirrored or sharded object, one line per replica for others.

    Args:
        fresh: Whether the summaries are up to date.
    """
    earlier = "" if fresh else _EARLIER
    if state.tracked.ended:
        return f"<stale: {state.label} ({state.type_name}) is gone, since the engines were restarted, stopped or left>"
    if state.divided and state.gone:
        return f"<lost: shards of {state.label} ({state.type_name}) were on engines that have ended or left>"
    if mirrored:
        replica = next((r for r in range(size) if r in state.facts), 0)
        return f"{kind_of(state, mirrored=True)}({_line(state, replica)}) on {size} replica{'s' * (size != 1)}{earlier}"
    lines = [f"  {replica}: {_line(state, replica)}" for replica in range(size)]
    return "PerReplica:{\n" + ",\n".join(lines) + "\n}" + earlier


def _line(state: RemoteState, replica: int) -> str:
    type_name, shape, dtype, device, value = _cells(state, replica)
    if not type_name:
        return value
    facts = " ".join(part for part in (type_name.rsplit(".", 1)[-1], shape, dtype, device) if part)
    if not shape:
        return value if value else f"<{facts}>"
    return f"<{facts}>" if not value else f"{value} <{facts}>"


def _cells(state: RemoteState, replica: int) -> tuple[str, str, str, str, str]:
    """Return (type, shape, dtype, device, value) of one replica's component."""
    if replica in state.lost:
        return "", "", "", "", _LOST
    if replica in state.local:
        value = state.local[replica]
        return type(value).__name__, "", "", "", repr(value)
    fact = state.facts.get(replica)
    if fact is None:
        return "", "", "", "", _UNASSIGNED
    summary = fact.summary
    return summary.type, summary.shape, summary.dtype, summary.device, summary.text or ""


def kind_of(state: RemoteState, *, mirrored: bool) -> str:
    """Return the word for a handle's kind: "Sharded" for one that is read like a mirrored object, but is divided."""
    if mirrored:
        return "Sharded" if state.divided else "Mirrored"
    return "PerReplica"


def as_model(handle: DistributedValues) -> ValueModel:
    """Return the model of a handle's view, with the current components if the engines can answer."""
    from distnb.runtime.inspection.inspecting import inspect

    state, size = state_of_handle(handle), handle.num_replicas
    kind = kind_of(state, mirrored=isinstance(handle, Mirrored))
    if state.tracked.ended or (state.divided and state.gone):
        return ValueModel(kind=kind, size=size, components={}, notes=(as_text(state, size, mirrored=False),))
    inspected = state.operations.inspect(handle)
    components, absent = {}, {}
    for replica in range(size):
        fact = state.facts.get(replica)
        if replica in state.lost:
            absent[replica] = _LOST
        elif replica in state.local:
            components[replica] = inspect(state.local[replica])
        elif fact is None:
            absent[replica] = _UNASSIGNED
        elif inspected is not None and replica in inspected:
            components[replica] = inspected[replica]
        else:
            summary = fact.summary
            components[replica] = Inspected(
                type=summary.type.rsplit(".", 1)[-1],
                text=summary.text or "",
                shape=summary.shape,
                dtype=summary.dtype,
                device=summary.device,
                note="not inspected",
            )
    notes = () if inspected is not None else (_EARLIER.strip(),)
    if state.together:
        notes = (*notes, "Each replica holds a part. A read combines the parts into the whole value.")
    return ValueModel(kind=kind, size=size, components=components, absent=absent, notes=notes, together=state.together)
