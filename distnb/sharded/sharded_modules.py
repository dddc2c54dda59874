"""The sharding of modules made in scopes: each parameter becomes a DTensor, of which this replica holds a part.

    Transformer                 a root: gathers embedding, head and norm
      blocks.0 … blocks.11      units: each is gathered before it computes, and freed afterwards

A model is made in the host memory of replica 0 (`construction.py`), which sends one parameter after another
(`initial_values.py`). Each replica keeps its part.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from distnb.accelerators import torch_device
from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.compat import fsdp_internals, torch_internals
from distnb.errors import ContextError
from distnb.options import StrategySpec
from distnb.sharded.making.construction import Construction
from distnb.sharded.making.initial_values import InitialValues, blank, complete
from distnb.sharded.making.lost_values import require_values
from distnb.sharded.meshes import note_mesh
from distnb.sharded.parts import fill_part, is_whole, local_part, part_of
from distnb.sharded.plain_modules import release
from distnb.sharded.train_steps.forward_passes import ForwardPasses
from distnb.sharded.train_steps.passes import ShardedPasses
from distnb.sharded.train_steps.shared_collectives import AllGather, ReduceScatter
from distnb.sharded.units import forward_roots, split_by_dtype, units_of
from distnb.sharded.whole_copies import copy_module, holds_shards
from distnb.strategies.sharded import MIN_SIZE, Precision, UnitPredicate
from distnb.variables.variable import Variable

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["ShardedModules"]

_OWNER = "_distnb_sharded_by"
"""The attribute of a shard with the number of its `ShardedModules`. It outlives the shard's place in a model."""
_HAS_HOOK = "_distnb_divides_gradient"
_numbers = itertools.count()


class ShardedModules:
    """The sharded modules of one strategy on this replica.

    Args:
        spec: The strategy's description.
        group: Returns the current process group.
        passes: The observation of the modules' backward passes.
        construction: The rules for the parameters of modules that are not sharded yet.
    """

    def __init__(
        self, spec: StrategySpec, group: Callable[[], Group], passes: ShardedPasses, construction: Construction
    ) -> None:
        self._spec = spec
        self._group = group
        self._passes = passes
        self._construction = construction
        self._mesh: tuple[Any, DeviceMesh] | None = None  # with the process group for which it was made
        self._forwards = ForwardPasses(group)
        self._noted_writes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Parameters as they were made, which an optimizer may be given, and the sharded parameters in their place.
        self._replaced = WeakIdKeyDictionary()
        self._number = next(_numbers)

    @property
    def mesh(self) -> DeviceMesh:
        """The replicas, as torch arranges them: in one row, or in a row for each group that holds a whole model."""
        group = self._group()
        if self._mesh is None or self._mesh[0] is not group.process_group:
            per_group = self._spec.option("replicas_per_group", group.size)
            shape: tuple[int, ...] = (group.size,) if per_group == group.size else (group.size // per_group, per_group)
            names = ("replicate", "shard")[-len(shape) :]
            self._mesh = group.process_group, init_device_mesh(group.device.type, shape, mesh_dim_names=names)
            note_mesh(self._mesh[1], self._spec)
        return self._mesh[1]

    @property
    def device(self) -> torch.device:
        """The device of this replica's shards."""
        return torch.device("cpu") if self._spec.option("offload") else torch_device(self._group().device)

    @property
    def roots(self) -> list[Any]:
        """The models that can be called."""
        return list(self._passes.roots)

    @property
    def models(self) -> list[Any]:
        """The models, also those whose shards belong to other replicas."""
        return self._forwards.models

    def owns(self, tensor: object) -> bool:
        """Return whether a tensor is a sharded parameter of this strategy."""
        if not isinstance(tensor, DTensor):
            return False
        if not hasattr(tensor, _OWNER) and any(tensor is each for each in self.parameters()):
            setattr(tensor, _OWNER, self._number)  # `module.to(dtype)` and `load_state_dict(assign=True)` make new ones
        return bool(getattr(tensor, _OWNER, None) == self._number)

    def divides(self, tensor: object) -> bool:
        """Return whether a tensor is a sharded parameter or slot of an optimizer, or FSDP's copy of a parameter.

        FSDP makes new parameters for the gathered values, whose memory it frees after a pass.
        """
        return holds_shards(tensor) or any(fsdp_internals.holds_gathered(root, tensor) for root in self._passes.roots)

    def divide_gradients(self) -> None:
        """Have torch divide the gradients of operations of shards as the shards, which FSDP expects. Idempotent."""
        for each in self.parameters():
            if each.requires_grad and not hasattr(each, _HAS_HOOK):
                each.register_hook(unserializable_hook(functools.partial(_divided, weakref.ref(each))))
                setattr(each, _HAS_HOOK, True)

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter that has replaced a parameter, or the parameter itself."""
        sharded = self._replaced.get(parameter)
        return parameter if sharded is None else sharded

    def reset(self) -> None:
        """Return models to the state between two steps, after a failed program. Forget models of other replicas."""
        for root in self.roots:
            if self._forwards.has_all_parts(root):
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
        group = self._group()
        modules = [module for module in modules if self._is_incomplete(module)]
        if not modules:
            return
        roots = [root for module in modules for root in forward_roots(module) if _is_new(root)]
        for root in roots:
            _refuse_lazy(root)
        plans = [self._units_of(root, of_larger) for root in roots]
        divided = _divisible(roots).difference(*(whole for _, whole in plans))
        for transient, replacement in complete(group, modules, lambda each: id(each) in divided):
            self._replaced[transient] = replacement
        if self._construction.is_on_host:
            for module in modules:
                _place_whole(module, divided, torch_device(group.device))
        named = {
            id(each): (f"{type(root).__name__}.{name}", each)
            for root in roots
            for name, each in root.named_parameters()
            if id(each) in divided and not isinstance(each, DTensor)
        }
        values = InitialValues(group, list(named.values()))
        del named  # a host holds one whole model at most
        for root, (units, _) in zip(roots, plans, strict=True):
            if any(id(each) in divided for each in root.parameters()):
                self._shard_root(root, units, divided, values)
        values.finish()
        self._construction.begin()

    def forget_mesh(self) -> None:
        """Forget the mesh, which is made again when it is needed."""
        self._mesh = None

    def release(self, root: torch.nn.Module) -> None:
        """Remove FSDP from a model before its shards are divided over other replicas."""
        release(root)
        self._passes.forget(root)

    def shard_again(self, root: torch.nn.Module) -> None:
        """Shard a model whose shards are divided over the current replicas. All replicas call this."""
        divided = {id(each) for each in root.parameters() if isinstance(each, DTensor)}
        for each in root.parameters():
            if id(each) in divided:
                setattr(each, _OWNER, self._number)
        units, _ = self._units_of(root, of_larger=False)
        self._shard_root(root, units, divided, InitialValues(self._group(), []))

    def _is_incomplete(self, module: torch.nn.Module) -> bool:
        """Return whether a module has parameters to divide or to mirror, or a shard of another model."""
        if any(not self.divides(each) and find_mirror(each) is None for each in module.parameters()):
            return True
        return _is_new(module) and any(isinstance(each, DTensor) for each in module.parameters())

    def _units_of(self, root: torch.nn.Module, of_larger: bool) -> tuple[list[tuple[str, torch.nn.Module]], set[int]]:
        """Return the units of a model, and the `id()`s of parameters that no unit can have."""
        chooser = self._spec.option("shard_by")
        if of_larger and chooser == "block":
            chooser = None  # the part may be a block itself
        chosen = chooser.load() if isinstance(chooser, UnitPredicate) else chooser
        return split_by_dtype(root, units_of(root, chosen, self._spec.option("min_size", MIN_SIZE)))

    def _shard_root(
        self,
        root: torch.nn.Module,
        units: list[tuple[str, torch.nn.Module]],
        divided: Container[int],
        values: InitialValues,
    ) -> None:
        made = {name: each for name, each in root.named_parameters() if id(each) in divided}
        ignored = {each for each in root.parameters() if id(each) not in divided}
        _replace_by_empty(root, made.values())
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": _policy(self._spec.option("mixed_precision")),
            "offload_policy": CPUOffloadPolicy() if self._spec.option("offload") else OffloadPolicy(),
            "ignored_params": ignored,
            # By default FSDP keeps what a model itself has gathered in place of its shards, until a backward pass: a
            # program would change the copies, and compute with those from before a change.
            "reshard_after_forward": True,
        }
        group: Any = self.mesh.get_group("shard")
        all_gather, reduce_scatter = AllGather(group), ReduceScatter(group)
        for module in [*(unit for _, unit in units), root]:
            self._forwards.observe(module)
            unit = fully_shard(module, **options)
            _sharded_by[unit] = self, self._group().process_group
            fsdp_internals.copy_by(unit, _deep_copy)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_all_gather(all_gather)
            unit.set_custom_reduce_scatter(reduce_scatter)
            self._passes.observe(unit, reduce_scatter.begin)
        is_filled = self._fill(root, made, values)
        self._passes.add(root)
        self._forwards.add(root, is_filled=is_filled)
        root.register_load_state_dict_pre_hook(self._before_load)

    def _fill(self, root: torch.nn.Module, made: dict[str, torch.nn.Parameter], values: InitialValues) -> bool:
        """Replace a model's shards on the meta device by shards with initial values. All replicas get replica 0's.

        Args:
            root: The model.
            made: The parameters as they were made, by name. The table is emptied.
            values: Their values.

        Returns:
            Whether the model was not made on the meta device.
        """
        empty = {name: each for name, each in root.named_parameters() if name in made}
        # Two models may share a parameter. Then each gathers the same shard.
        shared = {name: shard for name in made if isinstance(shard := self.current(made[name]), DTensor)}
        parts = shared | {name: self._empty_part(each) for name, each in empty.items() if name not in shared}
        unmade = []
        for name in list(made):
            parameter = made.pop(name)
            if name in shared:
                continue
            whole = values.of(parameter)
            if whole is None:
                unmade.append(name)
            else:
                fill_part(parts[name], whole)
            self._replaced[parameter] = parts[name]
            torch_internals.move_gradient_hooks(parts[name], parameter)
            setattr(parts[name], _OWNER, self._number)
        receivers = {id(empty[name]): functools.partial(fill_part, parts[name]) for name in unmade}
        receivers |= {id(each): functools.partial(fill_part, each) for each in self._provide_scalars(root)}
        values.reset(root, receivers)
        names = {id(each): name for name, each in empty.items()}
        state = {
            name: parts[names[id(each)]]
            for name, each in root.named_parameters(remove_duplicate=False)  # tied parameters stay one object
            if id(each) in names
        }
        root.load_state_dict(state, strict=False, assign=True)
        return not (receivers or any(each.is_meta for each in root.buffers()))

    def _provide_scalars(self, root: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Replace scalars on the meta device by scalars with memory, and return these."""
        made = []
        for module in root.modules():
            for name, each in list(module.named_parameters(recurse=False)):
                if each.is_meta and not isinstance(each, DTensor):
                    self._replaced[each] = self._empty_part(each)
                    setattr(module, name, self._replaced[each])
                    made.append(self._replaced[each])
        return made

    def _empty_part(self, like: torch.nn.Parameter) -> torch.nn.Parameter:
        part = torch.empty_like(like, device=self.device)
        blank(local_part(part))
        return torch.nn.Parameter(part, requires_grad=like.requires_grad)

    # Copies -----------------------------------------------------------------------------------------------------------

    def deep_copy(self, module: torch.nn.Module, memo: dict[int, Any]) -> None:
        """Add a sharded copy of a sharded module to a memo of `copy.deepcopy`. All replicas must call this.

        Raises:
            ContextError: Other replicas have shards of the module.
        """
        if _sharded_by[module][1] is not self._group().process_group:
            raise ContextError(
                f"This {torch_internals.original_class(module).__name__} cannot be copied: it was sharded over other "
                "replicas. Make it again in the scope, and restore a checkpoint."
            )
        require_values(module.parameters(), f"this {torch_internals.original_class(module).__name__}")
        for each in [shard for shard in module.parameters() if isinstance(shard, DTensor)]:
            copied = torch.nn.Parameter(each.detach().clone(), each.requires_grad)
            setattr(copied, _OWNER, self._number)
            memo[id(each)] = copied
        copy_module(module, memo)
        root = memo[id(module)]
        root.__setstate__({})  # as Python does for other copies: a scope notes the module, and registers its scalars
        units = [(name, root.get_submodule(name)) for name in fsdp_internals.names_of_units(module)]
        divided = {id(each) for each in root.parameters() if isinstance(each, DTensor)}
        self._shard_root(root, units, divided, InitialValues(self._group(), []))

    # Loading whole values ---------------------------------------------------------------------------------------------

    def _before_load(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
        """Replace whole tensors in a state by this replica's parts."""
        for name, parameter in module.named_parameters(prefix=prefix.removesuffix("."), remove_duplicate=False):
            if is_whole(state.get(name), parameter):
                state[name] = part_of(state[name], parameter)


def _divided(parameter: weakref.ref[Any], gradient: torch.Tensor) -> torch.Tensor:
    """Return a sharded gradient that is divided like its parameter, and another one as it is."""
    shard = parameter()
    if shard is None or not isinstance(gradient, DTensor):
        return gradient
    return gradient.redistribute(placements=shard.placements)


_sharded_by: weakref.WeakKeyDictionary[Any, tuple[ShardedModules, Any]] = weakref.WeakKeyDictionary()
"""Who has sharded a module, with the process group of the replicas that have its shards."""


def _deep_copy(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    sharded, _ = _sharded_by[module]
    sharded.deep_copy(module, memo)
    return memo[id(module)]


def _writes(root: torch.nn.Module) -> int:
    return sum(each._version for each in root.parameters() if isinstance(each, DTensor))


def _is_new(root: torch.nn.Module) -> bool:
    """Return whether a model has no sharded part. Parameters that are added to a sharded model are mirrored."""
    return not any(isinstance(part, FSDPModule) for part in root.modules())


def _divisible(roots: Iterable[torch.nn.Module]) -> set[int]:
    """Return the `id()`s of the parameters of models that can be divided. Each replica holds the others whole.

    Those are scalars and others without rows, sparse ones, and variables, whose values have an aggregation.
    """
    return {id(each) for root in roots for each in root.parameters() if _is_divisible(each)}


def _is_divisible(parameter: torch.Tensor) -> bool:
    has_rows = parameter.dim() > 0 and parameter.numel() > 0 and parameter.layout is torch.strided
    return has_rows and not isinstance(parameter, Variable)


def _place_whole(module: torch.nn.Module, divided: Container[int], device: torch.device) -> None:
    """Move the tensors of a module that are not divided from the host, where they were made, to a device."""
    for part in module.modules():
        for members in (part._parameters, part._buffers, vars(part)):
            for each in members.values():
                if not isinstance(each, torch.Tensor) or id(each) in divided:
                    continue
                if each.device.type == "cpu" != device.type:
                    each.data = each.data.to(device)


def _replace_by_empty(root: torch.nn.Module, made: Iterable[torch.Tensor]) -> None:
    """Replace parameters by contiguous parameters without values, which FSDP can divide."""
    empty = {
        id(each): torch.nn.Parameter(
            torch.empty(each.shape, dtype=each.dtype, device="meta"), requires_grad=each.requires_grad
        )
        for each in made
    }
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in empty:
                setattr(module, name, empty[id(parameter)])


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
