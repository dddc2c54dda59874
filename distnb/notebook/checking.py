"""Whether the replicas hold the same bits of what is mirrored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distnb.errors import OptionError
from distnb.notebook.handles.handle import HANDLES, RemoteMirrored, RemotePerReplica, state_of_handle

__all__ = ["drift_reports"]


def drift_reports(user_ns: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, str]:
    """What the engines find when they compare what they hold, by name.

    Args:
        user_ns: The notebook's.
        names: What to compare; all mirrored variables when there are none.

    Raises:
        OptionError: A name is of nothing that lives on engines.
    """
    for name in names:
        if type(user_ns.get(name)) not in HANDLES:
            what = "is no variable" if name not in user_ns else "lives in the notebook, where it is one object"
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
