"""The results of planned calls that need no merging: equal plain values, and each replica's own number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distnb.notebook.handles.handle import RemoteState, make_handle
from distnb.notebook.namespace.handle_operations import HandleOperations
from distnb.notebook.namespace.tracked_objects import MISSING, TrackedObjects
from distnb.objects.plain import same
from distnb.topology import Team
from distnb.wire.planned import BARE, OwnNumber, PlannedReply

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
    if kind is not OwnNumber:
        return MISSING
    serial = first.serial
    facts = {rank: replies[engine].returned.described(serial) for rank, engine in enumerate(team.engines)}
    state = RemoteState(tracked=tracked, operations=operations, identity=facts[0].identity, facts=facts)
    state.as_of = changes
    handle = make_handle(state, mirrored=False, size=len(facts))
    tracked.add_handle(state.identity, handle)
    return handle
