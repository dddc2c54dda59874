"""Mirrored parameters that a program changed by hand, which may differ between replicas."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distnb.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["compare", "differences", "is_due"]

_SHOWN = 3
_EVERY = 256


def is_due(runs: int) -> bool:
    """Return whether a script compares before its call of `strategy.run` with this number, from 0.

    What has drifted apart stays apart, so a few comparisons suffice: 1, 2, 4, 8, …, 256, 512, 768, …
    """
    return runs > 0 and (runs & (runs - 1) == 0 or runs % _EVERY == 0)


def compare(group: Group, changed: Mapping[str, int]) -> None:
    """Warn on replica 0 if the replicas have changed parameters by hand in different ways.

    A replica that has changed none does not communicate.

    Args:
        group: The replicas.
        changed: Digests of the parameters that this replica has changed, by name.

    Raises:
        CollectiveMismatchError: Only some replicas have changed parameters.
    """
    if not changed:
        return
    try:
        every = group.all_gather_object(changed)
    except CollectiveMismatchError as error:
        error.add_note(
            f"strategy.run compares mirrored parameters that were changed by hand, here {_listed(list(changed))}. "
            "Another replica has not changed its copies. Make the same changes on every replica."
        )
        raise
    if group.rank == 0 and (text := differences(every, since="since an earlier strategy.run")):
        warnings.warn(text, stacklevel=4)


def differences(every: Sequence[Mapping[str, int]], *, since: str) -> str:
    """Return a warning about parameters that the replicas have changed by hand in different ways; "" without any.

    Args:
        every: For each replica, digests of the parameters that it has changed, by name.
        since: When they were changed, for the message.
    """
    names = dict.fromkeys(name for each in every for name in each)
    unlike = [name for name in names if len({each.get(name) for each in every}) > 1]
    if not unlike:
        return ""
    return (
        f"Mirrored variables differ between replicas {since}: {_listed(unlike)}. "
        "They were changed by hand, with different values on each replica. Let an optimizer step them after "
        "loss.backward(), or add up the gradients first: distnb.get_replica_context().all_reduce('sum', gradient). "
        "model.load_state_dict(strategy.broadcast(model.state_dict())) makes them equal again."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
