"""Sharded objects when the replicas change: their shards are gathered before, and divided again afterwards.

    gather      the old replicas    each tensor in turn is gathered in host memory, by the first replica that stays
    sent        one of them         packs modules without FSDP, and shards without memory, for the new replicas
    divide      the new replicas    each tensor is sent in turn, and each replica keeps its part; models get FSDP again

Tensors stay the same objects: optimizers, lists and other code hold them. The values of a tensor that could not be
gathered, because an engine with a shard has ended, are lost (`lost_values.py`).

Objects of other libraries, such as Keras's models, are left out.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.compat import torch_internals
from distnb.options import StrategySpec
from distnb.sharded.keras import library_objects
from distnb.sharded.making.initial_values import receive_whole
from distnb.sharded.making.lost_values import any_lost, lose
from distnb.sharded.meshes import note_mesh, strategy_of
from distnb.sharded.parts import fill_part
from distnb.sharded.plain_modules import plain_attributes
from distnb.sharded.sharded_replica import ShardedSpmd

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group
    from distnb.runtime.spmd import SpmdProcess
    from distnb.sharded.sharded_modules import ShardedModules

__all__ = ["Gathered", "divide", "gather", "is_movable", "sent"]

_Place = tuple[Any, ...]
"""A place of a tensor, equal on all replicas: the name of an object, and the place in it."""

_GRADIENT = "grad"

Gathered = dict[_Place, torch.Tensor]
"""Whole tensors on the host, by their places. Gradients have the place of their parameter with `_GRADIENT`."""

_OWN_ATTRIBUTES = "_distnb_"


def is_movable(value: Any) -> bool:
    """Return whether an object of which this replica holds shards can be divided again."""
    return not library_objects.shards_in(value)


def gather(group: Group, parts: Mapping[str, Any], heir: int) -> Gathered:
    """Gather the shards of objects. All replicas call this, and one of them gets the whole tensors.

    Args:
        group: The replicas.
        parts: The objects, by names that are equal on all replicas.
        heir: The replica that gets the tensors.
    """
    found = _tensors(parts)
    own = {place: (id(each), each.grad is not None) for place, each in found.items() if _is_whole_on(group.size, each)}
    replies: list[dict[_Place, tuple[int, bool]]] = group.all_gather_object(own)
    wholes: Gathered = {}
    known: set[int] = set()
    for place, (number, _) in replies[heir].items():
        if number in known or not all(place in reply for reply in replies):
            continue
        known.add(number)
        shards = {place: found[place]}
        if all(reply[place][1] for reply in replies):
            shards[*place, _GRADIENT] = found[place].grad
        for key, shard in shards.items():
            whole = shard.detach().full_tensor()
            if group.rank == heir:
                wholes[key] = whole.to("cpu", copy=True)
    return wholes


def _is_whole_on(replicas: int, shard: Any) -> bool:
    return bool(shard.device_mesh.size() == replicas) and not any_lost([shard])


def _tensors(parts: Mapping[str, Any]) -> dict[_Place, Any]:
    """Return the shards in objects, by all their places."""
    found: dict[_Place, Any] = {}
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            found[name,] = part
        elif isinstance(part, torch.nn.Module):
            for path, parameter in part.named_parameters(remove_duplicate=False):
                found[name, path] = parameter
        elif isinstance(part, torch.optim.Optimizer):
            given = optimized(part)
            for number, parameter in enumerate(given):
                found[name, number] = parameter
                for slot, value in part.state.get(parameter, {}).items():
                    found[name, number, slot] = value
    return {place: each for place, each in found.items() if strategy_of(each) is not None and each.is_leaf}


# For new replicas -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sent(parts: Iterable[Any]) -> Iterator[None]:
    """Return a context in which objects with shards can be pickled for new replicas, without the values of shards.

    Args:
        parts: The modules among the objects, and any others.
    """
    modules = [each for part in parts if isinstance(part, torch.nn.Module) for each in part.modules()]
    kinds: dict[type, Callable[[Any], Any]] = {DTensor: _reduce_shard}
    kinds |= {type(each): _reduce_module for each in modules if type(each) not in copyreg.dispatch_table}
    copyreg.dispatch_table.update(kinds)
    try:
        yield
    finally:
        for kind in kinds:
            del copyreg.dispatch_table[kind]


def _reduce_module(module: Any) -> Any:
    return torch_internals.reduce_module(torch_internals.original_class(module), plain_attributes(module))


def _reduce_shard(shard: Any) -> Any:
    spec = strategy_of(shard)
    if spec is None:
        return shard.__reduce_ex__(5)
    attributes = {key: value for key, value in vars(shard).items() if not key.startswith(_OWN_ATTRIBUTES)}
    layout = tuple(shard.shape), shard.stride(), shard.dtype, shard.device.type
    return _open_shard, (spec, layout, isinstance(shard, torch.nn.Parameter), shard.requires_grad, attributes)


def _open_shard(
    spec: StrategySpec, layout: tuple[Any, ...], is_parameter: bool, requires_grad: bool, attributes: dict[str, Any]
) -> Any:
    shard = torch_internals.unplaced_shard(*layout)
    note_mesh(shard.device_mesh, spec)
    if is_parameter:
        shard = torch.nn.Parameter(shard, requires_grad=requires_grad)
    vars(shard).update(attributes)
    return shard.requires_grad_(requires_grad)


# On the new replicas --------------------------------------------------------------------------------------------------


class _Facts(NamedTuple):
    """The facts about a shard on one replica.

    Attributes:
        number: The tensor's `id()` there.
        shape, stride, dtype: Those of the whole.
        placement: The way in which the tensor is divided within a group of replicas that holds it.
        strategy: The strategy that divides it.
        is_gathered, has_gradient: Whether the replica has the whole tensor, and its gradient.
    """

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placement: Any
    strategy: StrategySpec
    is_gathered: bool
    has_gradient: bool


class _Holding(NamedTuple):
    """The holdings of one replica before shards are divided again.

    Attributes:
        is_new: Whether the replica has received its objects from another one.
        tensors: Its shards.
        models: The places of its models, each with the strategy.
    """

    is_new: bool
    tensors: dict[_Place, _Facts]
    models: list[tuple[str, str, StrategySpec]]


def divide(
    process: SpmdProcess,
    parts: Mapping[str, Any],
    gathered: Gathered | None,
    resolve: Callable[[StrategySpec], Any],
) -> None:
    """Divide objects again, over the current replicas. All of them call this.

    Args:
        process: This replica.
        parts: The objects, by names that are equal on all replicas.
        gathered: The result of `gather` on this replica; None on a new one.
        resolve: Returns the strategy that a spec describes.
    """
    group, gathered = process.group, gathered or {}
    found = _tensors(parts)
    held: list[_Holding] = group.all_gather_object(_holding(process, parts, found, gathered))
    sources = [rank for rank, each in enumerate(held) if any(facts.is_gathered for facts in each.tensors.values())]
    sources += [rank for rank, each in enumerate(held) if not each.is_new]
    if not sources:
        return
    source = sources[0]
    common = {place for place in held[source].tensors if all(place in each.tensors for each in held)}
    roots = []
    for name, path, spec in held[source].models:
        inner = [place for place in held[source].tensors if place[0] == name and str(place[1]).startswith(path)]
        if common.issuperset(inner):
            root = parts[name].get_submodule(path.removesuffix("."))
            roots.append((root, _modules(process, resolve, spec)))
    for runtime in _runtimes(process):
        runtime.sharded_modules.forget_mesh()  # a replica that was replaced has none
    for root, modules in roots:
        modules.release(root)
    known: set[int] = set()
    for place, facts in held[source].tensors.items():
        if place not in common or facts.number in known:
            continue
        known.add(facts.number)
        modules, tensor = _modules(process, resolve, facts.strategy), found[place]
        part = _part(group, modules, facts, gathered.get(place), source if facts.is_gathered else None)
        torch_internals.replace_local(tensor, part)
        if not facts.is_gathered:
            lose(tensor)
        tensor.grad = None
        if facts.has_gradient:
            tensor.grad = _part(group, modules, facts, gathered.get((*place, _GRADIENT)), source)
    for root, modules in roots:
        modules.shard_again(root)
    for runtime in _runtimes(process):
        for part in parts.values():
            if isinstance(part, torch.optim.Optimizer):
                runtime.follow_loading(part)
        runtime.sharded_modules.note_writes()


def _runtimes(process: SpmdProcess) -> list[ShardedSpmd]:
    """Return the runtimes of this replica's sharded strategies."""
    found = map(process.runtime_of, process.strategies)
    return [runtime for runtime in found if isinstance(runtime, ShardedSpmd)]


def _holding(
    process: SpmdProcess, parts: Mapping[str, Any], found: Mapping[_Place, Any], gathered: Gathered
) -> _Holding:
    places: dict[int, tuple[str, str]] = {}
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            for path, module in part.named_modules():
                places.setdefault(id(module), (name, f"{path}." if path else ""))
    models = [
        (*places[id(model)], runtime.spec)
        for runtime in _runtimes(process)
        for model in runtime.sharded_modules.models
        if id(model) in places
    ]
    tensors = {
        place: _Facts(
            number=id(each),
            shape=tuple(each.shape),
            stride=each.stride(),
            dtype=each.dtype,
            placement=each.placements[-1],
            strategy=strategy_of(each),  # type: ignore[arg-type]
            is_gathered=place in gathered,
            has_gradient=(*place, _GRADIENT) in gathered,
        )
        for place, each in found.items()
    }
    return _Holding(all(map(torch_internals.is_unplaced, found.values())), tensors, models)


def _modules(process: SpmdProcess, resolve: Callable[[StrategySpec], Any], spec: StrategySpec) -> ShardedModules:
    runtime = process.runtime_of(resolve(spec))
    assert isinstance(runtime, ShardedSpmd), "only a ShardedStrategy divides tensors"
    return runtime.sharded_modules


def _part(
    group: Group, modules: ShardedModules, facts: _Facts, whole: torch.Tensor | None, source: int | None
) -> DTensor:
    """Return this replica's part of a tensor; without values if no replica has the whole tensor."""
    mesh, shape = modules.mesh, torch.Size(facts.shape)
    last = Replicate() if facts.placement.is_partial() else facts.placement
    placements = (*(Replicate(),) * (mesh.ndim - 1), last)
    own, _ = torch_internals.shape_and_offset(facts.shape, mesh, placements)
    local = torch.empty(own, dtype=facts.dtype, device=modules.device)
    part = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=facts.stride)
    if source is not None:
        given = torch.empty(shape, dtype=facts.dtype, device="meta") if whole is None else whole
        fill_part(part, receive_whole(group, given, source))
    return part
