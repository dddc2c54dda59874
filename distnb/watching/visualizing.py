"""`distnb.visualize`: which replica and device holds what."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from distnb.runtime.this_process import this_process
from distnb.wire.value_facts import PLACEMENT

__all__ = ["visualize"]


def visualize(value: Any) -> None:
    """Show which replica, and which device, holds what of a value, with bytes.

    Drawn are mirrored copies, variables of central storage and on parameter servers, the rows of a batch, and any
    sharding of a `torch.distributed.tensor.DTensor`. In a notebook's ordinary cells the engines are asked where the
    value is; in a distributed cell each replica tells what it has, and the notebook puts that together. In a
    terminal it is told in text. Nothing of the values is sent, and replicas do not wait for each other.

    Args:
        value: A model, an optimizer, a tensor, a batch, a distributed dataset (which rows of its batches go where),
            anything nested of such, or a strategy: its replicas, their devices, and the memory that is free there.

    Raises:
        OptionError: There is no tensor in it.

    Example:
        >>> import torch, distnb
        >>> distnb.visualize(torch.zeros(2, 3))
        Tensor · this process: 24 B
        shape   dtype    part  on            device  each
        (2, 3)  float32  all   this process  cpu     24 B
    """
    if this_process.publish is not None:
        from distnb.runtime.inspection.holdings import report

        told = report(value)
        this_process.publish({PLACEMENT: told, "text/plain": repr(told["replicas"])})
    else:
        import_module("distnb.widgets.value_views.showing").visualize(value)
