"""The runtime of a ShardedStrategy on one replica: as of a mirrored strategy, but modules are sharded."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from distnb.accelerators import torch_device
from distnb.collectives.eager import always_eager
from distnb.collectives.gradients.optimizer_steps import SurroundedSteps, optimized, with_closure_called
from distnb.collectives.gradients.parameter_groups import Identity
from distnb.collectives.verify import callsite
from distnb.errors import ContextError, OptionError
from distnb.options import StrategySpec
from distnb.runtime import contexts
from distnb.runtime.base import Owner
from distnb.runtime.replica import Spmd
from distnb.runtime.scopes import foreign_libraries
from distnb.runtime.scopes.registration import ParameterKey, Registration
from distnb.sharded import library_hooks, pretrained_models
from distnb.sharded.keras import library_objects
from distnb.sharded.making.construction import Construction, in_constructor
from distnb.sharded.making.lost_values import require_values
from distnb.sharded.parts import is_whole, part_of
from distnb.sharded.sharded_modules import ShardedModules
from distnb.sharded.train_steps.local_steps import LocalStep
from distnb.sharded.train_steps.passes import ShardedPasses
from distnb.sharded.whole_copies import holds_shards
from distnb.strategies.sharded import not_elementwise
from distnb.variables.elementwise import is_elementwise

if TYPE_CHECKING:
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["ShardedSpmd"]


class _ShardedRegistration(Registration):
    """The registration of modules that are sharded, and of variables and scalars that are mirrored."""

    sharded: ShardedModules

    def owns(self, made: torch.Tensor | torch.nn.Module) -> bool:
        return super().owns(made) or self.sharded.owns(made)

    def _prepare(self, roots: Sequence[torch.nn.Module]) -> None:
        foreign_libraries.prepare()  # the scope may have imported a library
        pretrained_models.install()
        found = [(root, library_objects.modules_in(root)) for root in roots]
        self.sharded.shard([root for root, wrapped in found if wrapped is None])
        layers = [(root, wrapped) for root, wrapped in found if wrapped is not None]
        if layers and self.strategy.spec.option("offload"):
            raise OptionError(
                f"offload=True cannot be used for a {type(layers[0][0]).__name__} of Keras: Keras's optimizers compute "
                "on the GPU, and the shards would be in the host's memory. Leave out the option."
            )
        self.sharded.shard([module for _, wrapped in layers for module in wrapped], of_larger=True)
        for layer, _ in layers:
            library_objects.put_parameters(layer, self.sharded.current)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return super()._is_new(tensor) and not self.sharded.divides(tensor)

    def _register(self, parameter: Any, key: Any, name: str = "", at: ParameterKey | None = None) -> bool:
        return not self.sharded.divides(parameter) and super()._register(parameter, key, name, at)


class ShardedSpmd(Spmd):
    """The runtime of a ShardedStrategy on this replica.

    Args:
        process: This process as a replica.
        strategy: The strategy.
    """

    def __init__(self, process: SpmdProcess, strategy: Owner) -> None:
        self._sharded: ShardedModules
        self._followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # see `follow_loading`
        super().__init__(process, strategy)
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, LocalStep] = weakref.WeakKeyDictionary()
        SurroundedSteps(self._has_shards, self._before_step, self._after_step)
        library_hooks.install(self)

    def _make_registration(self) -> Registration:
        passes = ShardedPasses(lambda: self._process.group, self._sync, contexts.in_replica, self._before_common_pass)
        self._construction = Construction(lambda: torch_device(self._process.device), lambda: self._process.rank == 0)
        self._sharded = ShardedModules(self._strategy.spec, lambda: self._process.group, passes, self._construction)
        self._passes = passes
        made = _ShardedRegistration(
            self._strategy,
            self._sync,
            lambda: self._process.group,
            place=self._construction.place,
            before_call=self._before_call,
        )
        made.sharded = self._sharded
        return made

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """Return a context in which modules are made in host memory, and then sharded."""
        with super().scope() as strategy, self._construction.active():
            yield strategy

    # After a program that has failed ----------------------------------------------------------------------------------

    def _resynchronise(self, within: str) -> None:
        is_new = self._generation != self._process.group.generation
        super()._resynchronise(within)
        if is_new:
            self._sharded.reset()
            self._compare_steps()

    def _compare_steps(self) -> None:
        """Warn if the replicas' shards are of different steps: a program ended in the middle of one."""
        group = self._process.group
        if group.size == 1:
            return
        gc.collect()  # models that the program does not use any more remain for different times on the replicas
        writes = self._sharded.writes()
        self._sharded.note_writes()
        gathered: list[dict[str, int]] = group.all_gather_object(writes)
        torn = [name for name, count in writes.items() if any(each.get(name, count) != count for each in gathered)]
        if torn:  # a model that an engine has lost is not compared: its use raises an error
            callsite.current().warn(
                f"The shards of {', '.join(torn)} do not belong together: a program ended in the middle of a step, "
                "which some replicas have taken and others have not. Restore a checkpoint "
                "(distnb.Checkpoint(...).restore(path)), or make the model again in the scope."
            )

    @property
    def spec(self) -> StrategySpec:
        """The description of the strategy."""
        return self._strategy.spec

    @property
    def sharded_modules(self) -> ShardedModules:
        """The sharded modules."""
        return self._sharded

    def settle(self) -> None:
        """Prepare for other replicas: report shards of different steps, and shard what scopes have made."""
        self._resynchronise("resize")
        super().settle()
        self._passes.require_reduced()

    def writes(self) -> dict[tuple[str, Identity | None], int]:
        if self._generation != self._process.group.generation:
            return {}
        return super().writes() | {(name, None): count for name, count in self._sharded.writes().items()}

    # Computing --------------------------------------------------------------------------------------------------------

    def _explain(self, error: Exception) -> None:
        """Raise ContextError if torch cannot compute with shards what a program has them do."""
        if _is_of_shards(error):
            raise ContextError(
                f"An operation of shards failed ({type(error).__name__}). The parameters of a sharded model are "
                "shards, except in the `forward` of the unit that they belong to, and cannot be combined with "
                "ordinary tensors. Gather them (`parameter.full_tensor()`, which has gradients), or compute with "
                "shards alone."
            ) from error

    def _function_ended(self, *, failed: bool) -> None:
        if failed:
            self._sharded.reset()

    # Optimizers -------------------------------------------------------------------------------------------------------

    def before_optimizer(self) -> None:
        """Shard the modules that the current scope has made: an optimizer keeps shards, and makes slots for them."""
        if contexts.innermost() == (self._strategy, None):
            self.register_made()

    def _before_call(self) -> None:
        """Shard the modules that the current scope has made, before one of them computes."""
        # A library's loop calls modules, maybe on this replica alone; a constructor may call a part of its module.
        if contexts.execution() is None and not in_constructor():
            self.before_optimizer()

    def add_param_group(
        self, original: Callable[..., None], optimizer: torch.optim.Optimizer, param_group: dict[str, Any]
    ) -> None:
        """Give an optimizer the shards of the parameters that it was made for. Shard their modules first."""
        self.before_optimizer()
        given = param_group.get("params") if isinstance(param_group, dict) else None
        if given is None or isinstance(given, set):
            original(optimizer, param_group)  # raises
            return
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        param_group["params"] = [self._current(each) for each in listed]
        original(optimizer, param_group)
        if any(self._sharded.owns(each) for each in optimizer.param_groups[-1]["params"]):
            if not is_elementwise(type(optimizer)) or isinstance(optimizer, torch.optim.SparseAdam):
                raise not_elementwise(optimizer)
            self.follow_loading(optimizer)

    def follow_loading(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide whole tensors that an optimizer loads. Its hooks do not travel to new replicas."""
        if optimizer not in self._followed:
            self._followed.add(optimizer)
            optimizer.register_load_state_dict_pre_hook(_divide_state)

    def _current(self, given: Any) -> Any:
        if isinstance(given, tuple) and len(given) == 2:
            return given[0], self._current(given[1])
        return self._sharded.current(given) if isinstance(given, torch.Tensor) else given

    def zero_grad(self, original: Callable[..., None], owner: Any, *args: Any, **kwargs: Any) -> None:
        """Discard gradients that `no_sync` has left outside of `grad`, too."""
        original(owner, *args, **kwargs)
        self._passes.zero_gradients(owner)

    def full_tensor(
        self, original: Callable[..., torch.Tensor], tensor: DTensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Gather a tensor, unless the other replicas do not take part. Its gradients are aggregated over them."""
        contexts.require_all_replicas()
        require_values([tensor], f"this tensor of shape {list(tensor.shape)}")
        whole = original(tensor, *args, **kwargs)
        if whole.requires_grad and holds_shards(tensor):
            self._sharded.divide_gradients()
            entry = contexts.innermost()
            if entry is not None and entry[0] is self._strategy and entry[1] is not None:
                whole.register_hook(self._passes.aggregated)  # outside of `run`, gradients are equal on all replicas
        return whole

    def _has_shards(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(map(self._sharded.owns, optimized(optimizer)))

    @always_eager
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        args, kwargs = with_closure_called(args, kwargs)
        self._passes.check_step(optimizer)
        if args[0] is not optimizer:
            return args, kwargs  # it has parameters of another strategy, too
        step = self._steps[optimizer] = LocalStep(optimizer)
        return (step.substitute, *args[1:]), kwargs

    @always_eager
    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if (step := self._steps.pop(optimizer, None)) is not None:
            step.end(optimizer)


def _is_of_shards(error: Exception) -> bool:
    """Return whether torch raised an error because it lacks an operation of sharded tensors."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_of_torch = frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor.")
    return is_of_torch or "mixed torch.Tensor and DTensor" in str(error)


def _divide_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace whole tensors in an optimizer's state by this replica's parts."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = optimized(optimizer)
    state = dict(state_dict["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in state:
            state[number] = {
                key: part_of(value, parameter) if is_whole(value, parameter) else value
                for key, value in state[number].items()
            }
    return {**state_dict, "state": state}
