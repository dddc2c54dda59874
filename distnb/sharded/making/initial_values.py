"""The initial values of parameters when their model is divided: replica 0's, sent one parameter after another.

replica 0             the others
values                values         sent in one message with others of that kind
values                transient      sent alone: each replica keeps its rows, and forgets the rest
meta device           meta device    its module's `reset_parameters` sets it, and it is sent alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.runtime import randomness
from distnb.runtime.reduction.equal_values import make_equal, refuse_unlike
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.sharded.making.transient import TransientTensor

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["InitialValues", "blank", "complete", "is_filled", "receive_whole"]


class InitialValues:
    """The values of the parameters of one or several models. All replicas make this for the same models.

    Args:
        group: The replicas.
        named: The parameters with their names.

    Raises:
        StructureError: The replicas' parameters differ.
    """

    def __init__(self, group: Group, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._group = group
        described = [(name, tuple(each.shape), str(each.dtype)) for name, each in named]
        valued = [_has_values(each) for _, each in named]
        gathered = group.all_gather_object((described, valued)) if group.size > 1 else [(described, valued)]
        refuse_unlike([each for each, _ in gathered])
        self._unmade: set[int] = set()
        self._sent: set[int] = set()
        equal = []
        by_parameter = zip(*(flags for _, flags in gathered), strict=True)
        for (name, each), (here, *others) in zip(named, by_parameter, strict=True):
            if not here:
                self._unmade.add(id(each))
            elif all(others):
                equal.append((name, each))
            else:
                self._sent.add(id(each))
        if group.size > 1:
            make_equal(group, equal)

    @property
    def are_drawn_apart(self) -> bool:
        """True if replica 0 may have drawn other random numbers than the others."""
        return bool(self._unmade or self._sent)

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the whole value of a parameter; None if no replica has one. All replicas call this."""
        if id(parameter) in self._unmade:
            return None
        own = parameter.detach()
        return receive_whole(self._group, own) if id(parameter) in self._sent else own

    def reset(self, module: torch.nn.Module, unmade: Mapping[int, Callable[[torch.Tensor], None]]) -> None:
        """Have the modules in a module initialise their own parameters on the meta device, one module at a time.

        Children come before their parents, as in a construction. What a module does not set is left as it is. A module
        cannot change the parameters of its children, which are on the meta device meanwhile.

        Args:
            module: The module.
            unmade: The functions that receive the values, by the `id()`s of the parameters in their modules.
        """
        filled: set[int] = set()
        for part in _children_first(module, set()):
            self._reset(part, unmade, filled)

    def _reset(
        self, part: torch.nn.Module, unmade: Mapping[int, Callable[[torch.Tensor], None]], filled: set[int]
    ) -> None:
        # torch's MultiheadAttention calls its own method `_reset_parameters`.
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        before, buffers = dict(part._parameters), dict(part._buffers)
        own = {key: each for key, each in before.items() if each is not None and id(each) in unmade}
        lacking = {key: each for key, each in buffers.items() if each is not None and each.is_meta}
        if reset is None or not (own or lacking):
            return
        device = torch_device(self._group.device)
        for key, each in own.items():
            part._parameters[key] = torch.nn.Parameter(
                blank(torch.empty(each.shape, dtype=each.dtype, device=device)), requires_grad=each.requires_grad
            )
        for key, buffer in lacking.items():
            part._buffers[key] = torch.zeros_like(buffer, device=device)
        try:
            with device, torch.no_grad():
                reset()
            made = {key: part._parameters[key] for key in own}
        finally:
            part._parameters.update(own)
        for key, buffer in lacking.items():
            if part._buffers[key]._version == 0:  # type: ignore[union-attr]
                part._buffers[key] = buffer  # nothing has set it
        for key, each in own.items():
            if id(each) in filled:
                continue  # a tied parameter has the values of its first module
            whole = receive_whole(self._group, made[key].detach())  # type: ignore[union-attr]
            if is_filled(whole):
                filled.add(id(each))
                unmade[id(each)](whole)

    def finish(self) -> None:
        """Set the random states that replicas share to replica 0's."""
        if self._group.size > 1 and self.are_drawn_apart:
            randomness.share(self._group)


def receive_whole(group: Group, whole: torch.Tensor, source: int = 0) -> torch.Tensor:
    """Return a tensor of one replica, whose shape and dtype the others pass. All replicas call this."""
    if group.size == 1:
        return whole
    device = torch_device(group.device)
    if group.rank == source:
        whole = whole.to(device).contiguous()
    else:
        whole = torch.empty(whole.shape, dtype=whole.dtype, device=device)
    group.broadcast(whole, source)
    return whole


def complete(
    group: Group, modules: Sequence[torch.nn.Module], is_divided: Callable[[torch.Tensor], bool]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Replace transient members of modules that are not divided by members with replica 0's values.

    They are buffers and attributes that were computed from parameters, and parameters that each replica holds whole.

    Args:
        group: The replicas. All of them must call this with the same modules.
        modules: The modules.
        is_divided: Returns whether a parameter is to be divided.

    Yields:
        The replaced members, each with its replacement.
    """
    if group.size == 1:
        return
    own = {
        id(value): (number, path, key)
        for number, module in enumerate(modules)
        for path, part in module.named_modules()
        for key, value in _members(part)
        if isinstance(value, TransientTensor) and not is_divided(value)
    }
    for number, path, key in dict.fromkeys(chain.from_iterable(group.all_gather_object(list(own.values())))):
        value = getattr(modules[number].get_submodule(path), key)
        received = broadcast_tree(group, value if group.rank == 0 else None, 0)
        if group.rank != 0:
            is_parameter = isinstance(value, torch.nn.Parameter)
            replacement = torch.nn.Parameter(received, value.requires_grad) if is_parameter else received
            _replace(modules, value, replacement)
            yield value, replacement


def _replace(modules: Sequence[torch.nn.Module], member: Any, replacement: Any) -> None:
    for part in chain.from_iterable(module.modules() for module in modules):
        for key in [key for key, value in _members(part) if value is member]:
            setattr(part, key, replacement)


def _members(part: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from (*part._parameters.items(), *part._buffers.items(), *vars(part).items())


def _children_first(module: torch.nn.Module, seen: set[int]) -> Iterator[torch.nn.Module]:
    seen.add(id(module))
    for child in module.children():
        if id(child) not in seen:
            yield from _children_first(child, seen)
    yield module


def _has_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, TransientTensor))


# Values that nothing has set are NaN, or the smallest number of an integer dtype.


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with the value that means that it has none, and return it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.detach().fill_(float("nan"))
    return tensor.detach().fill_(0 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min)


def is_filled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was set since `blank`."""
    own = tensor.detach()
    if own.is_floating_point() or own.is_complex():
        return not bool(own.isnan().any())
    return own.dtype is torch.bool or not own.numel() or bool((own != torch.iinfo(own.dtype).min).any())
