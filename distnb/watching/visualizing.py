"""`distnb.visualize`: a picture of which replica and device holds which part of a value."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from distnb.runtime.this_process import this_process
from distnb.wire.value_facts import PLACEMENT

__all__ = ["visualize"]


def visualize(value: Any) -> None:
    """Show which part of a value each replica and each device holds, with its size in bytes.

    The picture covers mirrored copies, variables of central storage and on parameter servers, the rows of a batch, and
    any sharding of a `torch.distributed.tensor.DTensor`. In an ordinary cell, the notebook requests the parts from
    the engines. In a distributed cell, each replica reports its part, and the notebook combines the reports. In a
    terminal, the result is text. The values themselves are not sent, and the replicas do not wait for each other.

    Args:
        value: A model, an optimizer, a tensor, a batch, a distributed dataset (the picture shows which rows of its
            batches go to which replica), any nested structure of these, or a strategy (the picture shows its replicas,
            their devices, and the free memory).

    Raises:
        OptionError: The value contains no tensor.

    Example:
        >>> import torch, distnb
        >>> distnb.visualize(torch.zeros(2, 3))
        Tensor · this process: 24 B
        shape   dtype    part  on            device  each
        (2, 3)  float32  all   this process  cpu     24 B
    """
    if this_process.publish is not None:
        from distnb.runtime.inspection.holdings import report

        facts = report(value)
        this_process.publish({PLACEMENT: facts, "text/plain": repr(facts["replicas"])})
    else:
        import_module("distnb.widgets.value_views.showing").visualize(value)
