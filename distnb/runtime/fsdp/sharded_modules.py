"""The sharding of modules made in scopes: each parameter becomes a DTensor, of which this replica holds a part.

    Transformer                 a root: gathers embedding, head and norm
      blocks.0 … blocks.11      units: each is gathered before it computes, and freed afterwards

A large parameter has no memory while its module is made (`deferred.py`). It gets its initial values here, alone, and
this replica's part is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from distnb.accelerators import torch_device
from distnb.collectives.digests import digest
from distnb.compat import fsdp_internals, torch_internals
from distnb.errors import ContextError
from distnb.options import StrategySpec
from distnb.runtime import contexts
from distnb.runtime.fsdp.deferred import allocate_rest, allocating, is_deferred, materialise
from distnb.runtime.fsdp.passes import ScaledReduceScatter, ShardedPasses
from distnb.runtime.fsdp.sharding_options import MIN_SIZE, Precision, UnitPredicate
from distnb.runtime.fsdp.units import forward_roots, units_of
from distnb.runtime.fsdp.whole_copies import holds_shards, note_mesh
from distnb.runtime.reduction.equal_values import make_equal
from distnb.values.structure import flatten, map_structure

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["ShardedModules", "is_whole", "part_of"]


class ShardedModules:
    """The sharded modules of one strategy on this replica.

    Args:
        spec: The strategy's description.
        group: Returns the current process group.
        passes: The observation of the modules' backward passes.
    """

    def __init__(self, spec: StrategySpec, group: Callable[[], Group], passes: ShardedPasses) -> None:
        self._spec = spec
        self._group = group
        self._passes = passes
        self._mesh: tuple[Any, DeviceMesh] | None = None  # with the process group for which it was made
        self._groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of each model
        self._noted_writes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Parameters as they were made, which an optimizer may be given, and the sharded parameters in their place.
        self._replaced = WeakIdKeyDictionary()
        self._known = WeakIdKeyDictionary()

    @property
    def mesh(self) -> DeviceMesh:
        """The replicas, as torch arranges them: in one row, or in a row for each group that holds a whole model."""
        group = self._group()
        if self._mesh is None or self._mesh[0] is not group.process_group:
            per_group = self._spec.option("replicas_per_group", group.size)
            shape: tuple[int, ...] = (group.size,) if per_group == group.size else (group.size // per_group, per_group)
            names = ("replicate", "shard")[-len(shape) :]
            self._mesh = group.process_group, init_device_mesh(group.device.type, shape, mesh_dim_names=names)
            note_mesh(self._mesh[1])
        return self._mesh[1]

    @property
    def roots(self) -> list[Any]:
        """The models that can be called."""
        return list(self._passes.roots)

    def owns(self, tensor: object) -> bool:
        """Return whether a tensor is a sharded parameter of this strategy."""
        if not isinstance(tensor, DTensor):
            return False
        if tensor not in self._known:  # `module.to(dtype)` and `load_state_dict(assign=True)` make new parameters
            self._known.update((each, True) for each in self.parameters())
        return tensor in self._known

    def divides(self, tensor: object) -> bool:
        """Return whether a tensor is a sharded parameter or slot of an optimizer, or FSDP's copy of a parameter.

        FSDP makes new parameters for the gathered values, whose memory it frees after a pass.
        """
        return holds_shards(tensor) or any(fsdp_internals.holds_gathered(root, tensor) for root in self._passes.roots)

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter that has replaced a parameter, or the parameter itself."""
        sharded = self._replaced.get(parameter)
        return parameter if sharded is None else sharded

    def reshard(self) -> None:
        """Free the gathered parameters of all models. FSDP keeps those of a root after a forward pass."""
        for root in self._passes.roots:
            root.reshard()

    def reset(self) -> None:
        """Return models to the state between two steps, after a failed program. Forget models of other replicas."""
        for root in self.roots:
            if self._groups[root] is self._group().process_group:
                fsdp_internals.reset(root)
            else:
                self._passes.roots.discard(root)

    def parameters(self) -> list[DTensor]:
        """Return the shards of all models."""
        return [each for root in self._passes.roots for each in root.parameters() if isinstance(each, DTensor)]

    def writes(self) -> dict[str, int]:
        """Return the number of writes to this replica's shards since `note_writes`, by model.

        It is equal on replicas in the same step.
        """
        counts: dict[str, int] = {}
        for root in self._passes.roots:
            name = torch_internals.original_class(root).__name__
            counts[name] = counts.get(name, 0) + _writes(root) - self._noted_writes.get(root, 0)
        return counts

    def note_writes(self) -> None:
        """Count writes from here on."""
        self._noted_writes.update((root, _writes(root)) for root in self._passes.roots)

    # Sharding ---------------------------------------------------------------------------------------------------------

    def shard(self, modules: Iterable[torch.nn.Module], *, of_larger: bool = False) -> None:
        """Shard modules that no other new module contains. All replicas must call this with the same modules.

        Args:
            modules: The modules.
            of_larger: Whether the modules are parts of larger models. Then each is a unit, whose gathered parameters
                are freed after its forward pass. Those of a model itself are kept for the backward pass.

        Raises:
            ContextError: A parameter has no size yet.
            OptionError: `shard_by` cannot be honoured.
            StructureError: The replicas' modules differ.
        """
        with allocating():
            for module in modules:
                allocate_rest(module)
                for root in forward_roots(module):
                    parameters = list(root.parameters())
                    # Parameters that are added to a sharded model are mirrored.
                    is_new = not any(isinstance(each, DTensor) for each in parameters)
                    if is_new and any(map(_is_divisible, parameters)):
                        self._shard_root(root, of_larger)

    def _shard_root(self, root: torch.nn.Module, of_larger: bool) -> None:
        _refuse_lazy(root)
        chooser = self._spec.option("shard_by")
        if of_larger and chooser == "block":
            chooser = None  # the part may be a block itself
        chosen = chooser.load() if isinstance(chooser, UnitPredicate) else chooser
        units = units_of(root, chosen, self._spec.option("min_size", MIN_SIZE))
        made = {name: each for name, each in root.named_parameters() if _is_divisible(each)}
        self._make_equal([(name, each) for name, each in made.items() if not (each.is_meta or is_deferred(each))])
        deferred = {name: each for name, each in made.items() if is_deferred(each)}
        _replace_by_empty(root, deferred.values())
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": _policy(self._spec.option("mixed_precision")),
            "offload_policy": CPUOffloadPolicy() if self._spec.option("offload") else OffloadPolicy(),
            "ignored_params": {each for each in root.parameters() if not _is_divisible(each)},
        }
        if of_larger:
            options["reshard_after_forward"] = True  # by default FSDP does not free what a model itself has gathered
        for module in [*(unit for _, unit in units), root]:
            module.register_forward_hook(_without_views)
            unit = fully_shard(module, **options)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_reduce_scatter(ScaledReduceScatter(self._passes))
        if deferred:
            self._materialise(root, deferred)
        sharded = dict(root.named_parameters())
        for name, parameter in made.items():
            self._replaced[parameter] = sharded[name]
        self._passes.add(root)
        self._groups[root] = self._group().process_group
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_load_state_dict_pre_hook(self._before_load)

    def _materialise(self, root: torch.nn.Module, deferred: Mapping[str, torch.Tensor]) -> None:
        """Give shards their initial values, one whole parameter after another. All replicas get replica 0's."""
        group, digests = self._group(), {}
        sharded = dict(root.named_parameters())
        parts = {name: self._empty_part(sharded[name]) for name in deferred}  # before the larger, temporary memory
        for name, parameter in deferred.items():
            whole = materialise(parameter)
            digests[name] = digest(whole) if group.size > 1 else 0
            fill_part(parts[name], whole)
        first, *others = group.all_gather_object(digests) if group.size > 1 else [digests]
        for name in [name for name in first if any(other[name] != first[name] for other in others)]:
            whole = materialise(deferred[name]).contiguous()
            group.broadcast(whole, 0)
            fill_part(parts[name], whole)
        names = {id(each): name for name, each in sharded.items()}
        state = {
            name: parts[names[id(each)]]
            for name, each in root.named_parameters(remove_duplicate=False)  # tied parameters stay one object
            if names[id(each)] in parts
        }
        root.load_state_dict(state, strict=False, assign=True)

    def _empty_part(self, like: torch.nn.Parameter) -> torch.nn.Parameter:
        device = torch.device("cpu") if self._spec.option("offload") else torch_device(self._group().device)
        return torch.nn.Parameter(torch.empty_like(like, device=device), requires_grad=like.requires_grad)

    def _make_equal(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._group().size > 1:
            make_equal(self._group(), named)

    def _before_forward(self, root: torch.nn.Module, inputs: Any) -> None:
        contexts.require_all_replicas()
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in flatten(inputs)[0]):
            raise ContextError(
                f"A sharded {torch_internals.original_class(root).__name__} was called with tensors on the meta "
                "device, which have no values. Call it with ordinary tensors."
            )
        if self._groups.get(root) is not self._group().process_group:
            raise ContextError(
                f"This {torch_internals.original_class(root).__name__} was sharded over other replicas: the cluster "
                "was resized, or the program runs on other engines. Its shards on the engines that left are lost. Make "
                "the model again in the scope, and restore a checkpoint."
            )

    # Loading whole values ---------------------------------------------------------------------------------------------

    def _before_load(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
        """Replace whole tensors in a state by this replica's parts."""
        for name, parameter in module.named_parameters(prefix=prefix.removesuffix("."), remove_duplicate=False):
            if is_whole(state.get(name), parameter):
                state[name] = part_of(state[name], parameter)


def _writes(root: torch.nn.Module) -> int:
    return sum(each._version for each in root.parameters() if isinstance(each, DTensor))


def _without_views(_module: torch.nn.Module, _inputs: Any, outputs: Any) -> Any:
    """Replace outputs that are views by copies.

    FSDP gathers a unit's parameters again when the backward pass reaches its outputs. It would not notice the pass if
    the program changed such a view in place (`x = layer(x); x += residual`).
    """
    if not torch.is_grad_enabled():
        return outputs
    return map_structure(_without_base, outputs)


def _without_base(leaf: Any) -> Any:
    is_view = isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch_internals.is_view(leaf)
    return leaf.clone() if is_view else leaf


def is_whole(value: Any, parameter: Any) -> bool:
    """Return whether a value is a whole tensor for a parameter of which this replica holds a part."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return False
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def part_of(whole: torch.Tensor, like: Any) -> DTensor:
    """Return this replica's part of a whole tensor, divided like another tensor, and on its device."""
    part = torch.empty_like(like, dtype=whole.dtype)
    fill_part(part, whole)
    return cast("DTensor", part)


def fill_part(part: Any, whole: torch.Tensor) -> None:
    """Copy this replica's part of a whole tensor to a sharded one."""
    shape, offset = torch_internals.shape_and_offset_of_shard(part)
    window = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    with torch.no_grad():
        torch_internals.local_tensor(part).copy_(whole[window])


def _replace_by_empty(root: torch.nn.Module, deferred: Iterable[torch.Tensor]) -> None:
    """Replace deferred parameters by parameters without values, which FSDP can divide."""
    placeholders: dict[int, torch.nn.Parameter] = {}
    for each in deferred:
        empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        placeholders[id(each)] = torch.nn.Parameter(empty, requires_grad=each.requires_grad)
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in placeholders:
                setattr(module, name, placeholders[id(parameter)])


def _is_divisible(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has rows to divide. A scalar stays whole, and is mirrored."""
    return parameter.dim() > 0


def _refuse_lazy(root: torch.nn.Module) -> None:
    lazy = [name for name, each in root.named_parameters() if is_lazy(each)]
    if lazy:
        raise ContextError(
            f"{type(root).__name__} was made in the scope of a ShardedStrategy, and its parameter {lazy[0]!r} has no "
            "size yet. Give the sizes when you make the layer (torch.nn.Linear(64, 10) in place of LazyLinear(10))."
        )


def _policy(precision: Precision | None) -> MixedPrecisionPolicy:
    if precision is None:
        return MixedPrecisionPolicy()
    names = (precision.param_dtype, precision.reduce_dtype, precision.output_dtype)
    param, reduce, output = (None if name is None else getattr(torch, name) for name in names)
    return MixedPrecisionPolicy(
        param_dtype=param, reduce_dtype=reduce, output_dtype=output, cast_forward_inputs=precision.cast_forward_inputs
    )
