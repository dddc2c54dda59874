"""Making mirrored state equal again after a program that ended half-way through a step.

An interrupt or an error ends the replicas at the same collective, but not at the same line: one may have stepped its
optimizer already and another not. The first use of a strategy in a new generation of the group therefore compares
parameters, gradients and optimizer states, and where they differ takes over what replica 0 holds.

Buffers may differ by right: what forward passes wrote into them is of each replica's own examples. That a step was done
in part is seen by those that count (`num_batches_tracked`), or by what was found before; then the models' buffers are
taken over as well.
"""

from __future__ import annotations

import gc
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.gradients.bucket_agreement import checksum
from distnb.collectives.gradients.mirrored_parameters import find_mirror
from distnb.collectives.gradients.parameter_groups import ParameterGroup

__all__ = ["Buffers", "ResynchronisationGroup", "heal"]

Buffers = tuple[str, Sequence[torch.Tensor]]
"""How people call a model, and its buffers."""

# (class, the (family, place) of each of its parameters)
_OptimizerKey = tuple[str, tuple[tuple[int, int], ...]]


class ResynchronisationGroup(Protocol):
    """What healing needs of a process group."""

    rank: int

    def all_gather_object(self, value: object) -> list[object]:
        """Every replica's object."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replace the tensor on each replica by the one of replica `source`."""


@dataclass(frozen=True)
class _State:
    """What one replica holds, by numbers that are equal for equal bits.

    Attributes:
        layouts: Per family, in the order of making: the parameters' shapes and dtypes.
        values: Per family: the parameters.
        gradients: Per family: their gradients.
        optimizers: The optimizers that hold such parameters.
        buffers: Per model: the buffers' shapes and dtypes.
        counts: Per model: those buffers that hold whole numbers.
    """

    layouts: tuple[tuple[str, ...], ...]
    values: tuple[tuple[int, ...], ...]
    gradients: tuple[tuple[int | None, ...], ...]
    optimizers: dict[_OptimizerKey, int]
    buffers: tuple[tuple[str, ...], ...]
    counts: tuple[tuple[int, ...], ...]


def heal(
    group: ResynchronisationGroup, families: Sequence[ParameterGroup], buffers: Sequence[Buffers] = ()
) -> str | None:
    """Compare what the replicas hold of these families; take over replica 0's where it differs.

    Every replica calls it at the same place of its program, between steps.

    Args:
        group: The replicas.
        families: All families of one strategy, in the order of making.
        buffers: Those of its models, in the order of making.

    Returns:
        What was set anew, for a notice; None if all was equal, or if the replicas hold different models.
    """
    optimizers = _optimizers_of(families) if families else {}
    states = cast("list[_State]", group.all_gather_object(_state(families, optimizers, buffers)))
    first = states[0]
    if any(state.layouts != first.layouts for state in states) or all(state == first for state in states):
        # Models that differ are found, and told of, by the first pass that reaches them.
        return None
    told = [_heal_family(group, family, states, place) for place, family in enumerate(families)]
    for key in first.optimizers:
        if any(state.optimizers.get(key) != first.optimizers[key] for state in states):
            told.append(_heal_optimizer(group, key, optimizers.get(key)))
    if all(state.buffers == first.buffers for state in states):
        half_way = any(told)
        for place, model in enumerate(buffers):
            if half_way or any(state.counts[place] != first.counts[place] for state in states):
                told.append(_heal_buffers(group, *model))
    return ", ".join(text for text in told if text) or None


def _heal_family(
    group: ResynchronisationGroup, family: ParameterGroup, states: Sequence[_State], place: int
) -> str | None:
    told = []
    params = _parameters(family)
    if any(state.values[place] != states[0].values[place] for state in states):
        with torch.no_grad():
            for parameter in params:
                group.broadcast(parameter, 0)
        told.append("parameters")
    if any(state.gradients[place] != states[0].gradients[place] for state in states):
        for parameter in params:
            parameter.grad = None
        family.local.clear()
        told.append("gradients (to None)")
    family.checked = True
    return f"{family.description}'s {' and '.join(told)}" if told else None


def _heal_buffers(group: ResynchronisationGroup, name: str, buffers: Sequence[torch.Tensor]) -> str | None:
    with torch.no_grad():
        for buffer in buffers:
            group.broadcast(buffer, 0)
    return f"{name}'s buffers" if buffers else None


def _heal_optimizer(group: ResynchronisationGroup, key: _OptimizerKey, optimizer: torch.optim.Optimizer | None) -> str:
    device = torch.device("cpu")
    buffer = io.BytesIO()
    if group.rank == 0 and optimizer is not None:
        torch.save(optimizer.state_dict(), buffer)
        device = optimizer.param_groups[0]["params"][0].device
    elif optimizer is not None:
        device = optimizer.param_groups[0]["params"][0].device
    size = torch.tensor([len(buffer.getvalue())], dtype=torch.int64, device=device)
    group.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if group.rank == 0:
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    data = data.to(device)
    group.broadcast(data, 0)
    if group.rank != 0 and optimizer is not None:
        # It comes from another replica of the same program, which runs the same code. Loading takes each tensor where
        # it belongs: to its parameter's device, or not.
        state = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=False)
        optimizer.load_state_dict(state)
    return f"{key[0]}'s state"


# -- what this replica holds ------------------------------------------------------------------------------------------


def _parameters(family: ParameterGroup) -> list[torch.nn.Parameter]:
    found = [reference() for reference in family.references]
    return [parameter for parameter in found if parameter is not None and not is_lazy(parameter)]


def _state(
    families: Sequence[ParameterGroup],
    optimizers: dict[_OptimizerKey, torch.optim.Optimizer],
    buffers: Sequence[Buffers],
) -> _State:
    params = [_parameters(family) for family in families]
    return _State(
        layouts=tuple(map(_layout, params)),
        values=tuple(tuple(checksum(p) for p in family) for family in params),
        gradients=tuple(tuple(_gradient_checksum(p) for p in family) for family in params),
        optimizers={key: _optimizer_checksum(optimizer) for key, optimizer in optimizers.items()},
        buffers=tuple(_layout(tensors) for _, tensors in buffers),
        counts=tuple(tuple(checksum(t) for t in tensors if _counts(t)) for _, tensors in buffers),
    )


def _layout(tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    return tuple(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors)


def _counts(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _gradient_checksum(parameter: torch.nn.Parameter) -> int | None:
    return None if parameter.grad is None else checksum(parameter.grad.to_dense())


def _optimizers_of(families: Sequence[ParameterGroup]) -> dict[_OptimizerKey, torch.optim.Optimizer]:
    numbers = {family: number for number, family in enumerate(families)}
    found: dict[_OptimizerKey, torch.optim.Optimizer] = {}
    # Optimizers are known to nobody but their users; this runs once per generation.
    # (Their types are asked, since isinstance would look behind weak proxies, which may be dead.)
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]:
        mirrors = [find_mirror(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        places = tuple((numbers[m.family], m.place) for m in mirrors if m is not None and m.family in numbers)
        if places and len(places) == len(mirrors):
            found.setdefault((type(optimizer).__name__, places), optimizer)
    return found


def _optimizer_checksum(optimizer: torch.optim.Optimizer) -> int:
    return zlib.crc32(repr(_described(optimizer.state_dict())).encode())


def _described(value: Any) -> Any:
    """Nested containers of plain values, with a number for each tensor."""
    if isinstance(value, torch.Tensor):
        return checksum(value.to_dense()) if not is_lazy(value) else None
    if isinstance(value, dict):
        described = [
            (key if isinstance(key, str | int) else str(type(key)), _described(item)) for key, item in value.items()
        ]
        return sorted(described, key=lambda pair: str(pair[0]))  # each replica may have come to them in its own order
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__
