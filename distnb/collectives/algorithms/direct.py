"""The direct use of an algorithm, without a strategy: in cross-replica context, by all replicas together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.flat_packs import Packs
from distnb.collectives.algorithms.sums import combine
from distnb.collectives.group.interface import Group
from distnb.collectives.group.memberships import memberships
from distnb.errors import ContextError, DistributedValueError, OptionError
from distnb.options import CommunicationOptions, ReduceOp
from distnb.topology import Device, parse_device
from distnb.values.distributed import DistributedValues

if TYPE_CHECKING:
    from distnb.collectives.algorithms.base import CrossDeviceOps

__all__ = ["broadcast", "reduce"]


def reduce(ops: CrossDeviceOps, op: ReduceOp, value: Any, destinations: Any, options: object) -> torch.Tensor:
    """Reduce as `CrossDeviceOps.reduce`."""
    if options is not None and not isinstance(options, CommunicationOptions):
        raise OptionError(f"options={options!r}: give a distnb.CommunicationOptions, or leave it out.")
    group, tensor = _own(value, destinations, "reduce")
    if tensor.dtype is torch.bool:
        raise DistributedValueError(f"reduce {op.name} of booleans is not defined. Convert them first: value.long().")
    if op is ReduceOp.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.float64)
    if group is None:
        return tensor
    aggregation = Aggregation(group, ops, Packs(count=ops.num_packs))
    if options is not None:
        aggregation = aggregation.with_options(options)
    return combine(aggregation, op, [tensor])[0]


def broadcast(value: Any, destinations: Any) -> torch.Tensor:
    """Broadcast as `CrossDeviceOps.broadcast`."""
    group, tensor = _own(value, destinations, "broadcast")
    if group is None:
        return tensor
    message = tensor.detach().to(torch_device(group.device), copy=True).contiguous()
    group.broadcast(message, 0)
    return message.to(tensor.device)


def _own(value: Any, destinations: Any, method: str) -> tuple[Group | None, torch.Tensor]:
    """Return the replicas, if there are several, and this one's tensor."""
    group = memberships.current()
    if group is not None and group.size == 1:
        group = None
    if isinstance(value, DistributedValues):
        value.require_same_kind(method)
        if value.num_replicas != (1 if group is None else group.size):
            here = "there are none in this process" if group is None else f"there are {group.size} here"
            raise ContextError(
                f"CrossDeviceOps.{method} got a value of {value.num_replicas} replicas, and {here}. Call it in a "
                "%%distribute cell or in a script of that many replicas; strategy.reduce works everywhere."
            )
        value = value.component(0 if group is None else group.rank)
    _check_destinations(group, destinations, method)
    try:
        return group, torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise DistributedValueError(
            f"CrossDeviceOps.{method} takes tensors, arrays and numbers, and got a {type(value).__name__}."
        ) from None


def _check_destinations(group: Group | None, destinations: Any, method: str) -> None:
    given = destinations if isinstance(destinations, (list, tuple)) else [destinations]
    named = [str(parse_device(one)) for one in given if isinstance(one, (str, Device))]
    there: Sequence[str] = [] if group is None else [str(device) for device in group.devices]
    if group is not None and (unknown := [name for name in named if name not in there]):
        raise OptionError(
            f"{method} to {', '.join(unknown)}: no replica computes there; they compute on {', '.join(there)}. Every "
            "replica gets the result on its own device: leave destinations out, or give the value itself."
        )
