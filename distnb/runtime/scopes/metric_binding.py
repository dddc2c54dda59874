"""torchmetrics metrics on replicas: each replica updates its own copy, and reading a scope's metric aggregates them.

A metric finds its replicas through functions of this module, never through a strategy. It can therefore be copied and
sent, and in a process without replicas it becomes a plain metric again. torchmetrics wraps `update` again in every
copy, so this module replaces the wrapper of the class, not the method of one metric.

An update without rows, from an empty slice of a batch, is ignored by every metric. A replica that has had no rows adds
no state to the aggregate, because some metrics cannot distinguish an initial state from a counted one.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from distnb.compat import patches, torchmetrics_internals
from distnb.compat.torchmetrics_internals import default_states, updates
from distnb.errors import ContextError
from distnb.runtime import contexts
from distnb.runtime.scopes import inherited_counts
from distnb.runtime.scopes.inherited_counts import MetricCounts
from distnb.runtime.scopes.metric_names import add_names
from distnb.runtime.this_process import this_process
from distnb.values.structure import has_distributed, map_structure, select

__all__ = [
    "aggregated",
    "aggregates_here",
    "bind",
    "bind_all",
    "combined",
    "counts_of",
    "install",
    "is_installed",
    "is_shared",
    "is_untouched",
    "metrics_within",
    "read_by",
    "set_whole_state",
    "states_of",
    "whole_state",
    "without_rows",
]

COUNTED = "_distnb_counted"
"""The name of the attribute that holds the counts of a metric which other processes contribute."""


def install() -> None:
    """Bind every metric that is made in a scope from now on to its replicas. Idempotent; loads torchmetrics."""
    torchmetrics_internals.load()
    # Private names first: if the library lacks one, nothing is replaced.
    patches.wrap("torchmetrics:Metric._wrap_update", _wrap_update)
    patches.wrap("torchmetrics:MetricCollection._merge_compute_groups", _merge_groups)
    patches.wrap("torchmetrics:Metric.__init__", _init)
    patches.wrap("torchmetrics:Metric.__call__", _call)
    patches.wrap("torchmetrics:Metric.reset", _reset)
    patches.wrap("torchmetrics:Metric.update_called", _update_called)
    add_names()


def is_installed() -> bool:
    """Return whether `install` was called."""
    return bool(patches.installed("torchmetrics"))


def _init(plain: Callable[..., None], metric: Any, *args: Any, name: str | None = None, **kwargs: Any) -> None:
    plain(metric, *args, **kwargs)
    if name is not None:
        metric.name = name
    process, innermost = this_process.replica, contexts.innermost()
    if process is not None and innermost is not None and innermost[1] is None and process.runs(innermost[0]):
        bind(metric)


def _call(plain: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
    # With dist_sync_on_step the call is a collective of all replicas, so a replica without rows must not skip it.
    if this_process.is_one_of_several and not metric.dist_sync_on_step and without_rows(*_own(metric, args, kwargs)):
        return torch.tensor(torch.nan, device=metric.device)
    return plain(metric, *args, **kwargs)


def _reset(plain: Callable[[Any], None], metric: Any) -> None:
    vars(metric).pop(COUNTED, None)
    inherited_counts.drop(metric)
    plain(metric)


def _update_called(plain: Callable[[Any], bool], metric: Any) -> bool:
    """Return whether any process has updated a metric. If none has, torchmetrics warns when the metric is read."""
    return plain(metric) or _is_shared(metric) or COUNTED in vars(metric)


def _wrap_update(plain: Callable[..., Any], metric: Any, update: Callable[..., Any]) -> Callable[..., Any]:
    inherited_counts.note_copy(metric)
    return _on_replicas(metric, plain(metric, update))


def _merge_groups(plain: Callable[[Any], None], collection: Any) -> None:
    # torchmetrics lets metrics share a state if their states are equal after the first batch. On replicas and in
    # workers a batch may be empty, or too small to reveal that the states differ.
    store = this_process.store
    if not this_process.is_one_of_several and (store is None or not store.is_worker):
        plain(collection)


def bind_all() -> None:
    """Bind every existing metric, for a scope in which torchmetrics was first imported, before `install` was called."""
    import torchmetrics

    install()
    for each in gc.get_objects():
        if issubclass(type(each), torchmetrics.Metric) and "update" in vars(each):
            bind(each)


def bind(metric: Any) -> None:
    """Share a metric among the replicas: each updates its own copy, and reading it aggregates the copies."""
    install()
    inherited_counts.note_copy(metric)
    if not hasattr(metric.update, "_distnb"):  # made before torchmetrics' wrapper was replaced
        metric.update = _on_replicas(metric, metric.update)
    read_by(metric, aggregates_here, functools.partial(_aggregate, metric))


def read_by(metric: Any, has_others: Callable[[], bool], combine: Callable[..., None]) -> None:
    """Combine a metric's states with those of other processes whenever it is read.

    Args:
        has_others: Returns whether there are other processes.
        combine: The replacement of torchmetrics' `_sync_dist`.
    """
    metric.distributed_available_fn = has_others
    torchmetrics_internals.replace_combine(metric, combine)
    # Disable the cache. A process's cached result is valid until its own next update, but others may have counted more
    # since. If only some processes used their cache, the others would wait for them in the collective.
    metric.compute_with_cache = False


def aggregates_here() -> bool:
    """Return whether reading a metric combines several counts: of several replicas, or of replicas that were removed.

    Reading is then a collective of all replicas.
    """
    return this_process.is_one_of_several or (this_process.replica is not None and inherited_counts.is_any_here())


def _is_shared(metric: Any) -> bool:
    return aggregates_here() and metric.distributed_available_fn is aggregates_here


# -- updating ----------------------------------------------------------------------------------------------------------


def _on_replicas(metric: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a metric's `update` to count this replica's part of the arguments, and to skip a part without rows."""

    @functools.wraps(plain)
    def update(*args: Any, **kwargs: Any) -> Any:
        if not this_process.is_one_of_several:
            return plain(*args, **kwargs)
        if _is_shared(metric) and not contexts.in_replica() and not has_distributed((args, kwargs)):
            raise ContextError(
                f"{type(metric).__name__}.update was called outside replicas with plain values. A metric that was "
                "made in a scope is updated by each replica, with its own part: call update in the function that "
                "strategy.run calls, or give it the PerReplica values that run returned."
            )
        args, kwargs = _own(metric, args, kwargs)
        return None if without_rows(args, kwargs) else plain(*args, **kwargs)

    update._distnb = True  # type: ignore[attr-defined]
    return update


def _own(metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return this replica's components of the arguments, if a shared metric was called outside replica contexts."""
    if contexts.in_replica() or not _is_shared(metric):
        return args, kwargs
    process = this_process.replica
    assert process is not None
    own: tuple[tuple[Any, ...], dict[str, Any]] = select((args, kwargs), process.rank, process.size)
    return own


def without_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an update has no examples: all arguments that have a length have length 0.

    Scalars and flags (a weight, `real=True`) have no length. A string counts as one example, and so does each item of a
    list regardless of its content. For example, an image without any detections counts.
    """
    lengths = [length for value in (*args, *kwargs.values()) for length in _lengths(value)]
    return bool(lengths) and not any(lengths)


def _lengths(value: Any) -> Iterator[int]:
    shape = getattr(value, "shape", None)
    if isinstance(shape, Sequence):
        yield from map(int, shape[:1])
    elif isinstance(value, (str, bytes)):
        yield 1
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _lengths(each)
    elif isinstance(value, Sequence):
        yield len(value)


# -- reading -----------------------------------------------------------------------------------------------------------


def _aggregate(metric: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """Combine the replicas' states of any type in one message. This replaces torchmetrics' `_sync_dist`."""
    if default_states(metric) and not _combine(metric):  # a wrapper has no states; its inner metrics do
        warnings.warn(
            f"{type(metric).__name__}.compute was called before any replica updated the metric.", stacklevel=2
        )


def _combine(metric: Any) -> bool:
    """Set a metric's states to the combined counts of all replicas. Return False if no replica has counted anything."""
    process = this_process.replica
    assert process is not None
    gathered: list[list[Mapping[str, Any]]] = process.group.all_gather_object(
        [each.states for each in counts_of(metric)]
    )
    states = [state for theirs in gathered for state in theirs]
    if not states:
        return False
    if not all(gathered):
        source = next(replica for replica, theirs in enumerate(gathered) if theirs)
        _share_attributes(metric, source, not gathered[process.rank])
    device = metric.device
    for name, reduction in torchmetrics_internals.reductions(metric).items():
        parts = map_structure(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, [state[name] for state in states]
        )
        setattr(metric, name, combined(parts, reduction, isinstance(default_states(metric)[name], list)))
    return True


def counts_of(metric: Any) -> list[MetricCounts]:
    """Return this process's counts of a metric, on the host: its own, if there are any, and those it has inherited."""
    if is_untouched(metric):
        return inherited_counts.inherited(metric)
    states = map_structure(_on_host, states_of(metric))
    return [MetricCounts(updates(metric), states, _attributes(metric)), *inherited_counts.inherited(metric)]


def states_of(metric: Any) -> dict[str, Any]:
    """Return a metric's own states, by name."""
    return {name: getattr(metric, name) for name in default_states(metric)}


def _share_attributes(metric: Any, source: int, lacks: bool) -> None:
    """Copy attributes other than states, which a replica's `update` has set, to replicas that were never updated.

    Args:
        source: The replica that sends its attributes.
        lacks: Whether this replica was never updated.
    """
    process = this_process.replica
    assert process is not None
    there = process.group.all_gather_object(_attributes(metric) if process.rank == source else None)[source]
    for name, value in there.items() if lacks else ():
        if getattr(metric, name, None) is None:
            setattr(metric, name, value.to(metric.device) if isinstance(value, torch.Tensor) else value)


def _attributes(metric: Any) -> dict[str, Any]:
    """Return a metric's public attributes of simple types, which `update` may have set, on the host."""
    simple, states = (bool, int, float, str, torch.dtype, torch.Tensor), default_states(metric)
    return {
        name: _on_host(value)
        for name, value in vars(metric).items()
        if isinstance(value, simple) and not name.startswith("_") and name not in states
    }


def combined(parts: list[Any], reduction: Callable[[Any], Any] | None, listed: bool) -> Any:
    """Combine the replicas' parts of one state: join lists, and reduce tensors.

    Args:
        parts: The state of each replica.
        reduction: The metric's reduction of this state. None: tensors are stacked.
        listed: Whether the state is a list.
    """
    from torchmetrics.utilities import dim_zero_cat

    if listed:
        joined = [each for part in parts for each in (part if isinstance(part, list) else [part])]
        return joined if reduction in (None, dim_zero_cat) else reduction(joined)
    if reduction is None:
        return parts[0] if len(parts) == 1 else torch.stack(parts)
    return reduction(torch.stack(parts))


def is_untouched(metric: Any) -> bool:
    """Return whether a metric has counted nothing.

    The number of updates is not enough: a metric that was loaded from a checkpoint has states without an update.
    """
    return updates(metric) == 0 and all(
        torch.equal(getattr(metric, name).cpu(), default.cpu())
        if isinstance(default, torch.Tensor)
        else len(getattr(metric, name)) == 0
        for name, default in default_states(metric).items()
    )


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


# -- whole states ------------------------------------------------------------------------------------------------------


def metrics_within(value: Any) -> list[tuple[str, Any]]:
    """Return the path of each metric that has states in a metric or a collection, including itself, and the metric.

    Return an empty list for any other value.
    """
    torchmetrics: Any = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection)):
        return []
    modules = value.named_modules()
    return [(path, each) for path, each in modules if isinstance(each, torchmetrics.Metric) and default_states(each)]


def is_shared(value: Any) -> bool:
    """Return whether an object is a metric or a collection that several replicas share, each with its own counts."""
    return any(_is_shared(metric) for _, metric in metrics_within(value))


def aggregated(value: Any) -> Any:
    """Return a copy of a metric that holds the counts of all replicas. All replicas must call this function."""
    whole = [whole_state(metric) for _, metric in metrics_within(value)]
    copied = copy.deepcopy(value)
    for (_, metric), saved in zip(metrics_within(copied), whole, strict=True):
        _set_state(metric, saved)
    return copied


def whole_state(metric: Any) -> dict[str, Any]:
    """Return a metric's total counts in all processes, for a checkpoint: the number of updates and the states."""
    total, own, counted = updates(metric), states_of(metric), vars(metric).get(COUNTED)
    if counted is None and not _is_shared(metric):
        return {"updates": total, "states": own}
    try:
        if counted is not None:
            total += counted.updates
            counted.combine(metric)
        else:
            process = this_process.replica
            assert process is not None
            total += sum(each.updates for each in inherited_counts.inherited(metric))
            total = sum(process.group.all_gather_object(total))
            _combine(metric)
        return {"updates": total, "states": states_of(metric)}
    finally:
        for name, value in own.items():
            setattr(metric, name, value)


def set_whole_state(metric: Any, saved: dict[str, Any]) -> None:
    """Restore a metric from `whole_state`. Replica 0 gets all counts, and the metrics of other replicas are reset."""
    metric.reset()
    process = this_process.replica
    if process is None or process.rank == 0 or not _is_shared(metric):
        _set_state(metric, saved)


def _set_state(metric: Any, saved: dict[str, Any]) -> None:
    inherited_counts.drop(metric)
    device = metric.device
    for name, value in saved["states"].items():
        own = map_structure(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, value)
        setattr(metric, name, own)
    torchmetrics_internals.set_updates(metric, saved["updates"])
