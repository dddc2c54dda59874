"""The parts of a value that this process holds: the rows of a batch, a shard, a copy of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.compat import torch_internals
from distnb.errors import OptionError
from distnb.input.cutting import slice_bounds
from distnb.input.dataset import DistributedDataset
from distnb.runtime.inspection.inspecting import as_tensor, device_of, optimizer_state
from distnb.runtime.scopes.registration import is_scope_buffer
from distnb.runtime.this_process import this_process
from distnb.values import DistributedValues, Mirrored, structure
from distnb.wire.value_facts import Bounds, Holding, Kind

__all__ = ["holdings_of", "may_hold", "no_tensor", "report"]

_DEEPEST = 12
_MOST = 5_000  # the number of values visited in one structure, at most


def report(value: Any) -> dict[str, Any]:
    """Describe the parts of a value that this replica holds, with its number, so that another process can draw them.

    Raises:
        OptionError: The value has no tensors and is of a type that cannot have any.
    """
    process = this_process.replica
    size, rank = (process.size, process.rank) if process is not None else (1, 0)
    held = holdings_of(value)
    if not held and not may_hold(value):
        raise no_tensor(value)
    return {"kind": type(value).__name__, "size": size, "replicas": {rank: held}}


def may_hold(value: Any) -> bool:
    """Return whether a value is of a type that holds tensors, even if it has none yet, such as a new optimizer."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer | DistributedValues | torch.Tensor)


def no_tensor(value: Any) -> OptionError:
    """Return the error for a value without anything to draw."""
    return OptionError(
        f"visualize got a {type(value).__name__} without any tensor. It draws the places of models, optimizers, "
        "tensors, batches, distributed datasets, strategies, and nested structures of these."
    )


def holdings_of(value: Any) -> tuple[Holding, ...]:
    """Return the parts of a value's tensors that this process holds.

    The value may be a tensor, a module, an optimizer, a dataset, a strategy or a nested structure of these. Nothing is
    computed, and other replicas need not take part.
    """
    return tuple(_holdings(value, "", iter(range(_MOST)), 0))


def _holdings(value: Any, name: str, left: Iterator[int], depth: int) -> Iterator[Holding]:
    if depth > _DEEPEST or next(left, None) is None:  # without limits, a container in itself would never end
        return
    process = this_process.replica
    if hasattr(type(value), "worker_devices") and process is not None:  # a strategy
        yield Holding(name="", whole=(), bounds=None, kind="own", device=str(process.team.devices[process.rank]))
    elif isinstance(value, DistributedDataset):
        yield from _batches(value)
    elif isinstance(value, DistributedValues):
        yield from _components(value, name, left, depth)
    elif isinstance(value, torch.nn.Module):
        named = [*value.named_parameters(prefix=name), *value.named_buffers(prefix=name)]
        units = _units(value, name)
        for full, tensor in named:
            for part in _tensor(tensor, full):
                yield part._replace(note=f"{part.note}, gathered with {_unit(full, units)}") if units else part
    elif isinstance(value, torch.optim.Optimizer):
        yield from _holdings(optimizer_state(value), name, left, depth)
    elif (children := structure.children(value)) is not None:
        yield from (part for inner, child in children for part in _holdings(child, name + inner, left, depth + 1))
    elif as_tensor(value) is not None:
        yield from _tensor(value, name)


def _units(model: torch.nn.Module, prefix: str) -> list[str]:
    """Return the names of the modules whose parameters FSDP gathers together, inner ones first."""
    found = [
        name
        for name, part in model.named_modules(prefix=prefix)
        if torch_internals.original_class(part) is not type(part)
    ]
    return sorted(found, key=len, reverse=True)


def _unit(parameter: str, units: list[str]) -> str:
    """Return the unit to which a parameter belongs."""
    found = next((unit for unit in units if not unit or parameter.startswith(f"{unit}.")), "")
    return found or "the model"


def _components(value: DistributedValues, name: str, left: Iterator[int], depth: int) -> Iterator[Holding]:
    """Yield the parts in this process's components. The components of a batch are its rows, in replica order."""
    examples = value.global_batch_size
    for replica, component in zip(value.replica_ids, value.values, strict=True):
        holder = f"replica {replica}" if len(value.values) > 1 else ""
        for part in _holdings(component, name, left, depth):
            shape = part.whole
            if examples is not None and part.kind == "own" and shape:
                first, last = slice_bounds(examples, value.num_replicas, replica)
                inner = tuple((0, size) for size in shape[1:])
                bounds = ((first, last), *inner) if last - first == shape[0] else None
                part = part._replace(whole=(examples, *shape[1:]), bounds=bounds, kind="rows")
                if bounds is None:
                    part = part._replace(note=f"{shape[0]} rows")
            elif isinstance(value, Mirrored) and part.kind == "own":
                part = part._replace(kind="copy")
            yield part._replace(holder=holder or part.holder)


def _tensor(value: Any, name: str) -> Iterator[Holding]:
    store = this_process.store
    stored = store.holdings(value) if store is not None and isinstance(value, torch.Tensor) else None
    if stored is not None:
        yield from (part._replace(name=name) for part in stored)
        return
    local = as_tensor(value)
    if local is None:  # a lazy parameter has no shape yet
        return
    whole = tuple(value.shape)
    kind, bounds, note = _part(value, whole)
    dtype = str(value.dtype).removeprefix("torch.")
    yield Holding(
        name=name,
        whole=whole,
        bounds=bounds,
        kind=kind,
        dtype=dtype,
        device=device_of(value),
        nbytes=local.numel() * local.itemsize,
        holder="",
        note=note,
    )


def _part(value: Any, whole: tuple[int, ...]) -> tuple[Kind, Bounds, str]:
    """Return the kind of this process's part of a tensor, its bounds, and a note."""
    everything = tuple((0, size) for size in whole)
    if hasattr(value, "device_mesh"):
        return _shard(value, everything)
    owner = _owner(value)
    if owner is not None:
        return "shared", everything, f"replica {owner} updates it"
    mirrored = find_mirror(value) is not None
    return "copy" if mirrored and not is_scope_buffer(value) else "own", everything, ""


def _shard(value: Any, everything: Bounds) -> tuple[Kind, Bounds, str]:
    note = f"{', '.join(map(_placement, value.placements))} on a mesh {tuple(value.device_mesh.shape)}"
    shape, offsets = torch_internals.shape_and_offset_of_shard(value)
    if len(offsets) != len(everything):  # this process is not part of the mesh
        return "shard", tuple((0, 0) for _ in everything), note
    bounds = tuple((first, first + size) for first, size in zip(offsets, shape, strict=True))
    if any(placement.is_partial() for placement in value.placements):
        return "partial", bounds, note
    return "copy" if bounds == everything else "shard", bounds, note


def _placement(placement: Any) -> str:
    """Return a placement as users write it, such as `Shard(0)`."""
    return repr(placement).replace("dim=", "")


def _owner(value: Any) -> int | None:
    """Return the number of the replica that updates a variable of central storage, or None for other values."""
    process = this_process.replica
    strategy = None if process is None or not isinstance(value, torch.Tensor) else process.strategy_of(value)
    if process is None or strategy is None:
        return None
    shared = process.runtime_of(strategy).registration.shared
    if shared is None:
        return None
    host = value if value.device.type == "cpu" else shared.hosts.find(value)
    return None if host is None else shared.owner_of(host)


# -- datasets ----------------------------------------------------------------------------------------------------------


def _batches(dataset: DistributedDataset) -> Iterator[Holding]:
    """Yield this replica's rows of a full global batch, and of the last one if it is smaller."""
    place, sizes = dataset.place, dataset.sizes
    if place.turns is not None:
        turns = place.turns
        note = f"input pipeline {turns.pipeline} of {turns.pipelines}, read by {turns.takers} in turn"
        yield Holding(name="each batch", whole=(), bounds=None, kind="rows", device=str(place.target), note=note)
        return
    if sizes is None:
        note = "how many rows a batch has is known when it is read"
        yield Holding(name="each batch", whole=(), bounds=None, kind="rows", device=str(place.target), note=note)
        return
    examples, batch = sizes
    full, rest = divmod(examples, batch)
    counted = f"{full} batches of {batch:,} rows" if full != 1 else f"1 batch of {batch:,} rows"
    for name, size in ((counted, batch if full else 0), ("the last batch", rest)):
        if size:
            bounds = (slice_bounds(size, place.num_replicas, place.replica_id),)
            yield Holding(name=name, whole=(size,), bounds=bounds, kind="rows", device=str(place.target))
