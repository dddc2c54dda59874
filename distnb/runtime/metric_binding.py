"""torchmetrics' metrics that were made in a scope: each replica updates its own, reading aggregates them.

A metric finds its replicas through functions of this module, never through a strategy: so it can be copied and sent,
and in a process without replicas it is a plain metric again.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from distnb.errors import ContextError
from distnb.runtime import contexts, this_process
from distnb.values.structure import has_distributed, select

__all__ = ["aggregates_here", "bind", "bind_all", "install"]

_ALIASES = {"update_state": "update", "result": "compute", "reset_state": "reset"}


def install() -> None:
    """From now on metrics that are made in a scope are bound to its replicas. Idempotent; loads torchmetrics.

    Every metric answers to Keras's names too: update_state, result, reset_state.
    """
    import torchmetrics

    plain = torchmetrics.Metric.__init__
    if getattr(plain, "_distnb", False):
        return

    @functools.wraps(plain)
    def init(metric: Any, *args: Any, **kwargs: Any) -> None:
        plain(metric, *args, **kwargs)
        if _in_scope():
            bind(metric)

    init._distnb = True  # type: ignore[attr-defined]
    torchmetrics.Metric.__init__ = init  # type: ignore[assignment,method-assign]
    for cls in (torchmetrics.Metric, torchmetrics.MetricCollection):
        for alias, name in _ALIASES.items():
            if not hasattr(cls, alias):
                setattr(cls, alias, _forward(alias, name))


def bind_all() -> None:
    """Bind every metric that there is: torchmetrics was loaded in the scope that has just ended."""
    import torchmetrics

    install()
    for each in gc.get_objects():
        if issubclass(type(each), torchmetrics.Metric) and "update" in vars(each):
            bind(each)


def _forward(alias: str, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    method.__name__ = alias
    method.__doc__ = f"The same as `{name}`."
    return method


def _in_scope() -> bool:
    process, innermost = this_process.replica(), contexts.innermost()
    return process is not None and innermost is not None and innermost[1] is None and process.runs(innermost[0])


def bind(metric: Any) -> None:
    """Make a metric one that the replicas share: updated by each, aggregated when read outside them."""
    if metric.distributed_available_fn is aggregates_here and getattr(metric.update, "_distnb", False):
        return
    metric.distributed_available_fn = aggregates_here
    metric.dist_sync_fn = gather_state
    # A value that was computed in a replica must not be given out as the aggregated one.
    metric.compute_with_cache = False
    plain = metric.update

    @functools.wraps(plain)
    def update(*args: Any, **kwargs: Any) -> Any:
        process = this_process.replica()
        if process is not None and process.size > 1 and not _in_replica():
            if not has_distributed((args, kwargs)):
                raise ContextError(
                    f"{type(metric).__name__}.update was called outside replicas with plain values. A metric that was "
                    "made in a scope is updated by each replica, with its own part: call update in the function that "
                    "strategy.run calls, or give it the PerReplica values that run returned."
                )
            args, kwargs = select((args, kwargs), process.rank, process.size)
        return plain(*args, **kwargs)

    update._distnb = True  # type: ignore[attr-defined]
    metric.update = update


def aggregates_here() -> bool:
    """Whether reading a metric here combines the replicas' states: outside replicas, when there are several."""
    process = this_process.replica()
    return process is not None and process.size > 1 and not _in_replica()


def gather_state(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Every replica's tensor of a metric's state; they may differ in every size, and be missing."""
    process = this_process.replica()
    assert process is not None
    device = state.device
    states: list[torch.Tensor] = process.group.all_gather_object(state.detach().cpu())
    # torchmetrics puts an empty float vector where a replica saw nothing: next to labels it would make them floats.
    filled = [one for one in states if one.shape != (0,)]
    return [one.to(device) for one in filled or states[:1]]


def _in_replica() -> bool:
    innermost = contexts.innermost()
    return innermost is not None and innermost[1] is not None
