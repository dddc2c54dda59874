"""Optimizers of variables that live once: each update is applied once, by one replica, and so is its state kept.

A step is taken together. Every replica calls it with the same aggregated gradients; of each shared variable one
replica, its owner, computes the update, right in the common memory, while the others wait. The tensors that an
optimizer keeps for a variable move to the common memory after the first step, and every replica's optimizer holds them.
So it is where the replicas compute on accelerators: the owner brings its gradients to the host, updates there, and then
all replicas renew the copies that their devices have.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.collectives.group.eager import always_eager
from distnb.errors import GradientError
from distnb.runtime.central.host_step import check_on_host, on_the_host
from distnb.runtime.central.memory_layout import Region, on_host
from distnb.runtime.central.shared_variables import SharedVariables

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync
    from distnb.collectives.group.groups import Group

__all__ = ["SharedOptimizers"]

_ALONE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers that update each parameter by itself, so that replicas can share the work. Others run on replica 0."""

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class _Shape:
    """A tensor of an optimizer's state, as its owner describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    stride: tuple[int, ...]
    offset: int


class _Same:
    """Stands for a tensor that the replicas share already."""


class SharedOptimizers:
    """The steps of all optimizers that hold variables of one strategy.

    Args:
        group: Gives the process group of the present generation.
        variables: The strategy's.
        sync: Its own: it knows the strategy's parameters.
    """

    def __init__(self, group: Callable[[], Group], variables: SharedVariables, sync: GradientSync) -> None:
        self._group = group
        self._variables = variables
        self._sync = sync
        self._told: weakref.WeakKeyDictionary[Optimizer, dict[int, dict[Any, Any]]] = weakref.WeakKeyDictionary()
        self._half_done: str | None = None
        _install(self)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's step is to be taken here."""
        return self._group().size > 1 and any(map(self._owns, _parameters(optimizer)))

    def _owns(self, parameter: torch.Tensor) -> bool:
        mirror = find_mirror(parameter)
        return mirror is not None and mirror.sync() is self._sync

    def tell_of_half_steps(self) -> None:
        """Warn if a program was ended here within a step. The replicas are equal nevertheless: variables live once."""
        name, self._half_done = self._half_done, None
        if name is not None:
            warnings.warn(
                f"A program ended within {name}.step(): that update may have been applied to some variables and not to "
                "others. Load a saved state if that matters.",
                UserWarning,
                stacklevel=2,
            )

    @always_eager
    def step(self, optimizer: Optimizer, compute: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Take one step, together with the other replicas.

        Args:
            optimizer: This replica's.
            compute: Its class's own `step`.
            args, kwargs: Its arguments.

        Raises:
            GradientError: An optimizer that cannot be applied once.
        """
        group, parameters = self._group(), _parameters(optimizer)
        alone = type(optimizer) in _ALONE
        if not alone:
            self._check(optimizer, parameters, args, kwargs)
        if not all(map(on_host, parameters)):
            check_on_host(optimizer, alone)
        args, kwargs, loss = _closed(args, kwargs)
        for parameter in parameters:
            if self._owns(parameter):
                self._variables.expect("parameter", parameter)
        if group.size > 1:
            group.note(f"{type(optimizer).__name__}.step", ())
        self._variables.settle()
        if not alone and any(each.numel() and self._variables.region_of(each) is None for each in parameters):
            raise GradientError(
                f"The replicas hold different variables, so {type(optimizer).__name__} cannot step them."
            )
        mine, others = self._divided(group.rank, parameters, alone)
        options = _options(optimizer)
        self._half_done = type(optimizer).__name__
        masters = self._variables.masters(mine)
        with (
            self._variables.opened(self._tensors_of(optimizer, mine)),
            _hidden(others),
            on_the_host(optimizer, masters),
        ):
            result = compute(optimizer, *args, **kwargs) if alone or group.rank == 0 else loss
        for parameter in others:
            increment_version(parameter)  # a graph that was kept from before is as outdated as where it was written to
        self._tell(group, optimizer, mine, None if _options(optimizer) == options else _options(optimizer))
        self._variables.renew([*mine, *others])  # all have taken the step
        self._half_done = None
        return result

    def _check(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        name = type(optimizer).__name__
        if any(each is not None for each in (*args, *kwargs.values())):
            raise GradientError(
                f"{name}.step() was given a closure, or other arguments. Under central storage one replica applies an "
                "update, and only torch's optimizers that call a closure once can be given one. Use one of them, or "
                "MirroredStrategy."
            )
        if not all(map(self._owns, parameters)):
            raise GradientError(
                f"{name} holds variables that were made in strategy.scope() of central storage and parameters that "
                "were not. Make two optimizers of it, or make all of the model in the scope."
            )

    def _divided(
        self, rank: int, parameters: Sequence[torch.Tensor], alone: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that this replica may update, and those that others do."""
        mine: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for parameter in parameters:
            region = self._variables.region_of(parameter)
            # One that is not shared is updated by each replica.
            if region is not None and (parameter.grad is not None or not alone):
                (mine if rank == (region.owner if alone else 0) else others).append(parameter)
        return mine, others

    def _tensors_of(self, optimizer: Optimizer, mine: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kept = [value for parameter in mine for value in optimizer.state.get(parameter, {}).values()]
        return [*mine, *(value for value in kept if isinstance(value, torch.Tensor))]

    # What the others learn ------------------------------------------------------------------------------------------

    def _tell(
        self, group: Group, optimizer: Optimizer, mine: Sequence[torch.Tensor], options: list[dict[str, Any]] | None
    ) -> None:
        """Wait until all have taken the step. Then have every replica hold what was added to the state."""
        told = self._told.setdefault(optimizer, {})
        new = {}
        for parameter in mine:
            described = self._described(optimizer.state.get(parameter, {}))
            if described != told.get(id(parameter)):
                new[id(parameter)] = described
        if not bool(
            torch.stack(group.all_gather(torch.tensor([bool(new) or options is not None], device="cpu"))).any()
        ):
            return
        numbers = {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}
        mine_by_number = {numbers[identity]: described for identity, described in new.items()}
        everyones = group.all_gather_object((mine_by_number, options))
        self._share_state(group, optimizer, [states for states, _ in everyones])
        for parameter in mine:
            if id(parameter) in new:
                told[id(parameter)] = self._described(optimizer.state.get(parameter, {}))
        if group.rank != 0 and everyones[0][1] is not None:
            for one, values in zip(optimizer.param_groups, everyones[0][1], strict=True):
                one.update(values)

    def _described(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """What a variable's owner keeps for it. What is neither a tensor nor a plain value stays with the owner."""
        described: dict[Any, Any] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if self._variables.region_of(value) is not None:
                    described[key] = _Same
                elif value.layout is torch.strided and on_host(value) and value.numel():
                    storage = value.untyped_storage()
                    described[key] = _Shape(
                        tuple(value.shape),
                        value.dtype,
                        storage.nbytes(),
                        tuple(value.stride()),
                        int(value.storage_offset()),
                    )
            elif isinstance(value, _PLAIN):
                described[key] = value
        return described

    def _share_state(self, group: Group, optimizer: Optimizer, told: Sequence[Mapping[int, Mapping[Any, Any]]]) -> None:
        parameters = _parameters(optimizer)
        new = [
            (owner, parameters[number], key, value)
            for owner, states in enumerate(told)
            for number, state in states.items()
            for key, value in state.items()
        ]
        shapes = [each for each in new if isinstance(each[3], _Shape)]
        regions = (
            self._variables.allot(group, [(shape.nbytes, owner) for owner, _, _, shape in shapes]) if shapes else []
        )
        for (owner, parameter, key, _), region in zip(shapes, regions, strict=True):
            if owner == group.rank:
                region.common.copy_(optimizer.state[parameter][key].untyped_storage())
        if shapes:
            group.barrier()
        for (owner, parameter, key, shape), region in zip(shapes, regions, strict=True):
            if owner != group.rank:
                optimizer.state[parameter][key] = _empty(shape, region)
            self._variables.put(f"{key} of {type(optimizer).__name__}", optimizer.state[parameter][key], region)
        for owner, parameter, key, value in new:
            if owner != group.rank and isinstance(value, _PLAIN):
                optimizer.state[parameter][key] = value


def _empty(shape: _Shape, region: Region) -> torch.Tensor:
    return torch.empty(0, dtype=shape.dtype, device="cpu").set_(region.own, shape.offset, shape.shape, shape.stride)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimizer may count in its groups."""
    return [
        {key: value for key, value in group.items() if isinstance(value, _PLAIN)} for group in optimizer.param_groups
    ]


def _closed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
    """Arguments whose closure was called already: its backward pass takes part in collectives, on every replica."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs, None
    with torch.enable_grad():
        loss = closure()
    return (lambda: loss,), {}, loss


@contextmanager
def _hidden(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Optimizers pass over parameters without a gradient."""
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


# -- every optimizer of the process ------------------------------------------------------------------------------------

_all: weakref.WeakSet[SharedOptimizers] = weakref.WeakSet()
_within = False
_plain_patch: Any = None


def _install(made: SharedOptimizers) -> None:
    """From now on every optimizer's step is looked at: within its hooks, which see what they see elsewhere."""
    global _plain_patch
    _all.add(made)
    if _plain_patch is not None:
        return
    _plain_patch = Optimizer._patch_step_function
    Optimizer._patch_step_function = _patch_step_function  # type: ignore[method-assign]
    waiting = [Optimizer]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        _wrap(kind)


def _patch_step_function(self: Optimizer) -> None:
    """What torch calls when an optimizer is made: it puts the calls of the hooks around its class's step."""
    _plain_patch(self)
    for kind in type(self).__mro__:
        _wrap(kind)


def _wrap(kind: type) -> None:
    hooked = kind.__dict__.get("step")
    compute = getattr(hooked, "__wrapped__", None)
    if not getattr(hooked, "hooked", False) or compute is None or getattr(compute, "_distnb", False):
        return

    @functools.wraps(compute)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        global _within
        shared = None
        if not _within:  # a step may call its base's, or another optimizer's
            shared = next((each for each in list(_all) if each.holds(self)), None)
        if shared is None:
            return compute(self, *args, **kwargs)
        _within = True
        try:
            return shared.step(self, compute, args, kwargs)
        finally:
            _within = False

    step._distnb = True  # type: ignore[attr-defined]
    around: Any = Optimizer.profile_hook_step(step)
    around.hooked = True
    kind.step = around  # type: ignore[attr-defined]
