"""The results of planned calls that need no merging: equal plain values, and each replica's own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distnb.notebook.handles.handle import RemoteState, make_handle
from distnb.notebook.namespace.handle_operations import HandleOperations
from distnb.notebook.namespace.tracked_objects import MISSING, TrackedObjects
from distnb.objects.plain import same
from distnb.topology import Team
from distnb.wire.planned import BARE, OwnTensors, PlannedReply, described

__all__ = ["quick_result"]


def quick_result(
    replies: Mapping[int, Any], team: Team, tracked: TrackedObjects, operations: HandleOperations, changes: int
) -> Any:
    """Return the result of a planned call, or `MISSING` if it must be merged like that of an ordinary call.

    Args:
        replies: The reply of each engine, all of which succeeded.
        changes: The value of `operations.changes` when the call was sent.
    """
    first = replies[team.engines[0]]
    if type(first) is not PlannedReply:
        return MISSING
    value, kind = first.returned, type(first.returned)
    for reply in replies.values():
        if type(reply) is not PlannedReply or type(reply.returned) is not kind:
            return MISSING
        if kind in BARE and not (reply.returned is value or same(reply.returned, value)):
            return MISSING
    if kind in BARE:
        return value
    if kind is not OwnTensors:
        return MISSING
    every = [replies[engine].returned for engine in team.engines]
    # The reprs of 1 and True differ, and of 0.0 and -0.0.
    if value.tree is not ... and len({repr(each.tree) for each in every}) > 1:
        return MISSING
    handles = []
    columns = zip(*[each.tensors for each in every], strict=True)
    for identity, column in zip(value.identities(first.serial), columns, strict=True):
        first_tensor = column[0]
        if first_tensor[3] is None and column.count(first_tensor) == team.size:  # as of a batch: no number to compare
            facts = dict.fromkeys(range(team.size), described(first_tensor, identity))
        else:
            facts = {rank: described(tensor, identity) for rank, tensor in enumerate(column)}
        state = RemoteState(tracked=tracked, operations=operations, identity=identity, facts=facts)
        state.as_of = changes
        handle = make_handle(state, mirrored=False, size=len(facts))
        tracked.add_handle(identity, handle)
        handles.append(handle)
    return value.filled(handles)
