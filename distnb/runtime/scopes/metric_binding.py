"""torchmetrics' metrics that were made in a scope: each replica updates its own, reading aggregates them, in `run` too.

A metric finds its replicas through functions of this module, never through a strategy: so it can be copied and sent,
and in a process without replicas it is a plain metric again.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from distnb.errors import ContextError
from distnb.runtime import contexts, this_process
from distnb.runtime.scopes import metric_names
from distnb.values.structure import has_distributed, select

__all__ = ["aggregates_here", "bind", "bind_all", "install"]

_NAMES = {
    "update_state": metric_names.update_state,
    "result": metric_names.result,
    "reset_state": metric_names.reset_state,
    "reset_states": metric_names.reset_state,
}


def install() -> None:
    """From now on metrics that are made in a scope are bound to its replicas. Idempotent; loads torchmetrics.

    Every metric answers to Keras's names too, and takes a `name`: see `metric_names`.
    """
    import torchmetrics

    plain = torchmetrics.Metric.__init__
    if getattr(plain, "_distnb", False):
        return

    @functools.wraps(plain)
    def init(metric: Any, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        plain(metric, *args, **kwargs)
        if name is not None:
            metric.name = name
        if _in_scope():
            bind(metric)

    init._distnb = True  # type: ignore[attr-defined]
    torchmetrics.Metric.__init__ = init  # type: ignore[assignment,method-assign]
    for cls in (torchmetrics.Metric, torchmetrics.MetricCollection):
        for name, method in _NAMES.items():
            if not hasattr(cls, name):
                setattr(cls, name, method)
    if not hasattr(torchmetrics.Metric, "name"):
        setattr(torchmetrics.Metric, "name", metric_names.DefaultName())  # noqa: B010 - torchmetrics declares none


def bind_all() -> None:
    """Bind every metric that there is: torchmetrics was loaded in the scope that has just ended."""
    import torchmetrics

    install()
    for each in gc.get_objects():
        if issubclass(type(each), torchmetrics.Metric) and "update" in vars(each):
            bind(each)


def _in_scope() -> bool:
    process, innermost = this_process.replica(), contexts.innermost()
    return process is not None and innermost is not None and innermost[1] is None and process.runs(innermost[0])


def bind(metric: Any) -> None:
    """Make a metric one that the replicas share: updated by each, aggregated when it is read."""
    if metric.distributed_available_fn is aggregates_here and getattr(metric.update, "_distnb", False):
        return
    metric.distributed_available_fn = aggregates_here
    metric.dist_sync_fn = gather_state
    # Other replicas may have taken in more since: whether reading communicates must not depend on this one alone.
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
    """Whether reading a metric here combines the replicas' states: wherever there are several. All of them read it."""
    process = this_process.replica()
    return process is not None and process.size > 1


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
