"""torchmetrics' metrics that were made in a scope: each replica updates its own, reading aggregates them.

A metric finds its replicas through functions of this module, never through a strategy: so it can be copied and sent,
and in a process without replicas it is a plain metric again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from distnb.errors import ContextError
from distnb.runtime import contexts
from distnb.values.structure import has_distributed, select

__all__ = ["add_aliases", "bind", "watch_metrics"]

_ALIASES = {"update_state": "update", "result": "compute", "reset_state": "reset"}


def add_aliases() -> None:
    """Let every torchmetrics metric answer to Keras's names too: update_state, result, reset_state."""
    import torchmetrics

    for cls in (torchmetrics.Metric, torchmetrics.MetricCollection):
        for alias, name in _ALIASES.items():
            if not hasattr(cls, alias):
                setattr(cls, alias, _forward(alias, name))


def _forward(alias: str, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    method.__name__ = alias
    method.__doc__ = f"The same as `{name}`."
    return method


class _Watching:
    """`Metric.__init__` while a scope is open."""

    def __init__(self, in_scope: Callable[[], bool]) -> None:
        import torchmetrics

        self._class = torchmetrics.Metric
        self._plain = plain = torchmetrics.Metric.__init__

        @functools.wraps(plain)
        def init(metric: Any, *args: Any, **kwargs: Any) -> None:
            plain(metric, *args, **kwargs)
            if in_scope():
                bind(metric)

        self._class.__init__ = init  # type: ignore[assignment,method-assign]

    def remove(self) -> None:
        self._class.__init__ = self._plain  # type: ignore[method-assign]


def watch_metrics(in_scope: Callable[[], bool]) -> _Watching:
    """Bind every metric that is made while `in_scope()` holds, until `remove` is called on what is returned."""
    add_aliases()
    return _Watching(in_scope)


def bind(metric: Any) -> None:
    """Make a metric one that the replicas share: updated by each, aggregated when read outside them."""
    metric.distributed_available_fn = aggregates_here
    metric.dist_sync_fn = gather_state
    # A value that was computed in a replica must not be given out as the aggregated one.
    metric.compute_with_cache = False
    plain = metric.update

    @functools.wraps(plain)
    def update(*args: Any, **kwargs: Any) -> Any:
        process = _process()
        if process is not None and process.size > 1 and not _in_replica():
            if not has_distributed((args, kwargs)):
                raise ContextError(
                    f"{type(metric).__name__}.update was called outside replicas with plain values. A metric that was "
                    "made in a scope is updated by each replica, with its own part: call update in the function that "
                    "strategy.run calls, or give it the PerReplica values that run returned."
                )
            args, kwargs = select((args, kwargs), process.rank, process.size)
        return plain(*args, **kwargs)

    metric.update = update


def aggregates_here() -> bool:
    """Whether reading a metric here combines the replicas' states: outside replicas, when there are several."""
    process = _process()
    return process is not None and process.size > 1 and not _in_replica()


def gather_state(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Every replica's tensor of a metric's state; they may differ in every size, and be missing."""
    process = _process()
    assert process is not None
    device = state.device
    states: list[torch.Tensor] = process.group.all_gather_object(state.detach().cpu())
    # torchmetrics puts an empty float vector where a replica saw nothing: next to labels it would make them floats.
    filled = [one for one in states if one.shape != (0,)]
    return [one.to(device) for one in filled or states[:1]]


def _process() -> Any:
    from distnb.runtime import spmd

    return spmd.current()


def _in_replica() -> bool:
    innermost = contexts.innermost()
    return innermost is not None and innermost[1] is not None
