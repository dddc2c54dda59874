"""What was made in a strategy's scope. Loads no torch: where it is not loaded, nothing was made."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_mirrored"]


def is_mirrored(value: Any) -> bool:
    """Whether an object was made in the scope of a strategy of several replicas, so that its replicas are kept equal.

    Args:
        value: A parameter; a module or an optimizer, of which every trainable parameter must be; or a metric.
    """
    torch = sys.modules.get("torch")
    registry = sys.modules.get("distnb.collectives.mirrored")
    if torch is None or registry is None:
        return False
    if isinstance(value, torch.Tensor):
        return bool(registry.is_mirrored(value))
    if isinstance(value, torch.nn.Module):
        if getattr(value, "distributed_available_fn", None) is not None:
            return _is_bound(value)
        parameters = list(value.parameters())
    elif isinstance(value, torch.optim.Optimizer):
        parameters = [parameter for group in value.param_groups for parameter in group["params"]]
    else:
        return False
    trainable = [parameter for parameter in parameters if parameter.requires_grad] or parameters
    return bool(trainable) and all(map(registry.is_mirrored, trainable))


def _is_bound(metric: Any) -> bool:
    binding = sys.modules.get("distnb.runtime.metric_binding")
    return binding is not None and metric.distributed_available_fn is binding.aggregates_here
