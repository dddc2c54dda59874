"""Telling that mirrored variables differ between replicas at the end of a cell."""

from __future__ import annotations

import warnings

from distnb.notebook.dispatch import Outcome

__all__ = ["warn_of_drift"]

_SHOWN = 4


def warn_of_drift(outcome: Outcome) -> None:
    """Warn if what a program changed by hand is not the same on all replicas: a change that only some made, too."""
    changed = [reply.changed for _, reply in sorted(outcome.replies.items())]
    names = dict.fromkeys(name for each in changed for name in each)
    unlike = [name for name in names if len({each.get(name) for each in changed}) > 1]
    if not unlike:
        return
    more = f" and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
    warnings.warn(
        f"Mirrored variables differ between replicas since this cell: {', '.join(unlike[:_SHOWN])}{more}. "
        "They were changed by hand, with values of each replica's own. Let an optimizer step them after "
        "loss.backward(), or add up the gradients first: distnb.get_replica_context().all_reduce('sum', gradient). "
        "model.load_state_dict(strategy.broadcast(model.state_dict())) makes them equal again.",
        stacklevel=3,
    )
