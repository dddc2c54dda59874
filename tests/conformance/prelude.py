"""The names that programs use in addition to torch's and distnb's: a part of each program's text.

`strategy` is the strategy; the harness makes it, and on parameter servers `coordinator`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any

import torch

import distnb

strategy: Any = None
coordinator: Any = None


def train(step, *tensors, batch_size=4):
    """Call `step` with each global batch of the tensors, and return the sums of its results."""
    results = []
    if coordinator is not None:  # one worker after another, since the order of asynchronous updates is not defined
        for number in range(0, len(tensors[0]), batch_size):
            batch = tuple(each[number : number + batch_size] for each in tensors)
            value = coordinator.schedule(step, args=(batch if len(batch) > 1 else batch[0],))
            coordinator.join()
            if value.fetch() is not None:
                results.append(float(value.fetch()))
        return results
    for batch in strategy.distribute_dataset(tensors if len(tensors) > 1 else tensors[0], batch_size=batch_size):
        value = strategy.run(step, args=(batch,))
        if value is not None:
            results.append(float(strategy.reduce("sum", value, axis=None)))
    return results


def pause():
    """Mark a place where `test_pauses.py` interrupts the program."""


def whole(*modules):
    """Return the tensors of modules as lists, by name."""
    named = [each.state_dict() for each in modules]
    return {f"{number}.{name}": value.tolist() for number, state in enumerate(named) for name, value in state.items()}


def rows(count, width, seed=1):
    """Return some numbers."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def mse(output, target):
    """Return the average of squared errors over the global batch."""
    return distnb.nn.compute_average_loss((output - target).pow(2).mean(dim=1))


_SOURCE = inspect.getsource(sys.modules[__name__])
TEXT = (
    "import torch\nimport distnb\ncoordinator = None\n"
    + "\n".join(
        ast.get_source_segment(_SOURCE, node) or ""
        for node in ast.parse(_SOURCE).body
        if isinstance(node, ast.FunctionDef)
    )
    + "\n"
)
