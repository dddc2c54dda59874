"""`torch.nn.SyncBatchNorm` on CPU replicas, which torch's implementation does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.sums import all_reduce
from distnb.compat import patches, torch_internals
from distnb.options import ReduceOp
from distnb.runtime.this_process import this_process

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["install"]


def install() -> None:
    """Replace the forward pass of layers in training on CPU tensors: use statistics of all replicas. Idempotent.

    torch handles layers with their own process group, and tensors on other devices.
    """
    patches.wrap("torch.nn:SyncBatchNorm.forward", _forward)


def _forward(plain: Callable[..., torch.Tensor], layer: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    process = this_process.replica
    if process is None or not layer.training or layer.process_group is not None or input.device.type != "cpu":
        return plain(layer, input)
    return _forward_of_all(layer, input, process.group)


def _forward_of_all(layer: Any, input: torch.Tensor, group: Group) -> torch.Tensor:
    torch_internals.check_batch(layer, input)
    values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    axes = [axis for axis in range(input.ndim) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
    count = values.new_full((1,), input.numel() // input.shape[1])
    sums = _sum(group, torch.cat([values.sum(axes), count]))
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centred = values - mean.view(shape)
    # The variance is computed from the deviations, in a second message. The alternative, mean(x²) - mean(x)², needs
    # only one message, but loses most digits when the mean is large.
    variance = _sum(group, centred.square().sum(axes)) / total
    if layer.track_running_stats:
        _track(layer, mean.detach(), variance.detach(), total)
    result = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        result = result * layer.weight.view(shape)
    if layer.bias is not None:
        result = result + layer.bias.view(shape)
    return result.to(input.dtype)


def _sum(group: Group, values: torch.Tensor) -> torch.Tensor:
    return values if group.size == 1 else all_reduce(Aggregation(group), ReduceOp.SUM, [values])[0]


def _track(layer: Any, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
    """Update the running statistics as `torch.nn.BatchNorm1d` does with the whole batch."""
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    factor = 1.0 / float(layer.num_batches_tracked) if momentum is None else momentum
    with torch.no_grad():
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), factor)
