"""The choice of the units of a model: the modules whose parameters are gathered, and freed, together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

import torch

from distnb.errors import OptionError

__all__ = ["forward_roots", "has_forward", "split_by_dtype", "units_of"]

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


def has_forward(module: torch.nn.Module) -> bool:
    """Return whether a module can be called. A ModuleList or ModuleDict cannot."""
    return type(module).forward is not torch.nn.Module.forward


def forward_roots(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules within a module that can be called: itself, or its members' if it is a container."""
    if has_forward(module):
        return [module]
    return [root for child in module.children() for root in forward_roots(child)]


def units_of(
    model: torch.nn.Module, shard_by: str | Callable[[str, torch.nn.Module], bool] | None, min_nbytes: int
) -> list[tuple[str, torch.nn.Module]]:
    """Return the units within a model with their names, inner ones first. The model itself is not among them.

    A module that shares a parameter with a module outside it is no unit, because a parameter belongs to one unit.

    Args:
        model: The model.
        shard_by: "block", None, or a function, as in ShardedStrategy.
        min_nbytes: The bytes of parameters that a unit needs, unless a function chose it.

    Raises:
        OptionError: `shard_by` is "block" and there are no repeated blocks; or a function chose a module that cannot
            be a unit.
    """
    if callable(shard_by):
        chosen = [(name, part) for name, part in model.named_modules() if part is not model and shard_by(name, part)]
        for name, part in chosen:
            why = "cannot be called" if not has_forward(part) else _shared_outside(model, part)
            if why:
                raise OptionError(
                    f"shard_by chose {name!r}, a {type(part).__name__} that {why}, so it cannot be a unit of its own. "
                    "Choose another module."
                )
        return _inner_first(chosen)
    blocks = list(_blocks(model, ""))
    if shard_by == "block" and not blocks:
        raise OptionError(
            f'shard_by="block": {type(model).__name__} has no repeated blocks (a ModuleList, or a Sequential, of '
            "several modules of one class). Leave it out, or give a function that chooses the modules."
        )
    found = [
        (name, part)
        for name, part in blocks or _largest(model, "")
        if has_forward(part) and _nbytes(part) >= max(min_nbytes, 1) and not _shared_outside(model, part)
    ]
    return _inner_first(found)


def split_by_dtype(
    model: torch.nn.Module, units: list[tuple[str, torch.nn.Module]]
) -> tuple[list[tuple[str, torch.nn.Module]], set[int]]:
    """Divide units whose parameters have several dtypes: FSDP gathers and reduces tensors of one dtype.

    Args:
        model: The model.
        units: The units in it.

    Returns:
        The units with those added that have another dtype than the unit that contains them, inner ones first; and the
        `id()`s of parameters of another dtype that no unit can have.
    """
    inner = {id(part) for _, part in units}
    added: list[tuple[str, torch.nn.Module]] = []
    whole: set[int] = set()

    def divide(name: str, part: torch.nn.Module, main: torch.dtype) -> None:
        whole.update(id(each) for each in part.parameters(recurse=False) if _is_of_another(each, main))
        for own, child in part.named_children():
            dtypes = set(_dtypes_in(child, inner))
            can_be_unit = has_forward(child) and not _shared_outside(model, child)
            if len(dtypes) == 1 and main not in dtypes and can_be_unit:
                added.append((f"{name}{own}", child))
            elif dtypes - {main}:
                divide(f"{name}{own}.", child, main)

    for name, unit in [*units, ("", model)]:
        dtypes = _dtypes_in(unit, inner - {id(unit)})
        if len(dtypes) > 1:
            divide(f"{name}." if name else "", unit, max(dtypes, key=lambda each: (dtypes[each], str(each))))
    return _inner_first([*units, *added]), whole


def _dtypes_in(module: torch.nn.Module, units: Collection[int]) -> Counter[torch.dtype]:
    """Return the bytes of a module's parameters that can be trained by dtype, without those of units within it."""
    if id(module) in units:
        return Counter()
    found: Counter[torch.dtype] = Counter()
    for each in module.parameters(recurse=False):
        if _is_trainable(each):
            found[each.dtype] += each.numel() * each.element_size()
    return sum((_dtypes_in(child, units) for child in module.children()), found)


def _is_of_another(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return _is_trainable(parameter) and parameter.dtype != dtype


def _is_trainable(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _blocks(model: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost repeated blocks: the members of a container of which several are of one class."""
    members = list(model.named_children())
    kinds = [type(each) for _, each in members if isinstance(model, _CONTAINERS)]
    for name, member in members:
        if kinds.count(type(member)) > 1 and any(True for _ in member.parameters()):
            yield f"{prefix}{name}", member
        else:
            yield from _blocks(member, f"{prefix}{name}.")


def _largest(model: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the children of a model that has more than one with parameters, in models that wrap one module."""
    children = [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]
    if len(children) == 1:
        name, child = children[0]
        yield from _largest(child, f"{prefix}{name}.")
    else:
        yield from ((f"{prefix}{name}", child) for name, child in children)


def _inner_first(units: list[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.nn.Module]]:
    """Sort units by depth, and remove a module's further names."""
    once = {id(part): (name, part) for name, part in reversed(units)}
    return sorted(once.values(), key=lambda each: -each[0].count("."))


def _nbytes(module: torch.nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def _shared_outside(model: torch.nn.Module, part: torch.nn.Module) -> str:
    """Return a phrase if a part of a model shares a parameter with a module outside the part, or ""."""
    within = {id(module) for module in part.modules()}
    inner = {id(each) for each in part.parameters()}
    for name, module in model.named_modules():
        if id(module) in within:
            continue
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            if id(parameter) in inner:
                return f"shares the parameter {own} with another module"
    return ""
