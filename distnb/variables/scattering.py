"""Changes of some rows of a variable: the arguments of scatter methods, and the combination of replicas' rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distnb.compat import torch_internals
from distnb.errors import DistributedValueError, OptionError, StructureError
from distnb.options import VariableAggregation
from distnb.values.distributed import DistributedValues
from distnb.variables.homes import Home
from distnb.variables.settings import Settings, value_for

__all__ = ["apply", "combine_replicas", "parse_scatter"]

_SUMMED = {"scatter_add", "scatter_sub", "scatter_mul", "scatter_div"}
_AVERAGED = {"scatter_add", "scatter_sub"}


def parse_scatter(
    variable: torch.Tensor, label: str, method: str, indices: Any, updates: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row numbers `[rows]` and their updates `[rows, ...]` from the arguments of a scatter method.

    `label` is the name of the variable in errors, and `method` the user's call.
    """
    if updates is None:
        indices, updates = _indices_and_values(indices, label, method)
    if isinstance(indices, DistributedValues):
        raise DistributedValueError(
            f"{method} of {label} got a {type(indices).__name__} as indices. Call it in the function that strategy.run "
            "calls, with the value in args."
        )
    rows = torch.as_tensor(indices, device=variable.device)
    if variable.ndim == 0:
        raise OptionError(f"{method} of {label}: it is a scalar and has no rows. Use assign, assign_add or assign_sub.")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool:
        raise OptionError(f"{method} of {label}: indices must be whole numbers, not {rows.dtype}.")
    rows = rows.long()
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < variable.shape[0]):
        raise OptionError(
            f"{method} of {label}: the indices {rows.reshape(-1).tolist()[:8]} are not all in the variable's "
            f"{variable.shape[0]} rows, 0 to {variable.shape[0] - 1}."
        )
    wanted = (*rows.shape, *variable.shape[1:])
    like = torch.empty((), dtype=variable.dtype, device=variable.device).expand(wanted)
    return rows.reshape(-1), value_for(like, label, method, updates).reshape(-1, *variable.shape[1:])


def _indices_and_values(slices: Any, label: str, method: str) -> Sequence[Any]:
    if isinstance(slices, torch.Tensor) and slices.layout is torch.sparse_coo and slices.sparse_dim() == 1:
        indices, values = torch_internals.sparse_parts(slices)
        return indices[0], values
    if hasattr(slices, "indices") and hasattr(slices, "values") and not isinstance(slices, torch.Tensor):
        return slices.indices, slices.values
    if isinstance(slices, (tuple, list)) and len(slices) == 2:
        return slices
    raise StructureError(
        f"{method} of {label} got a {type(slices).__name__} alone. Write {method}(indices, updates), or give one "
        "object with the attributes `indices` and `values`."
    )


def combine_replicas(
    home: Home, settings: Settings, method: str, rows: torch.Tensor, updates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the changes of all replicas. All replicas call this."""
    how = settings.aggregation
    if how is VariableAggregation.ONLY_FIRST_REPLICA:
        first, changes = home.every((rows, updates))[0]
        return first, changes
    fits = (how is VariableAggregation.SUM and method in _SUMMED) or (
        how is VariableAggregation.MEAN and method in _AVERAGED
    )
    if not fits:
        raise OptionError(
            f"{method} of {settings.label} in a function that strategy.run calls, with aggregation={how.name!r}: the "
            "combination of the replicas' values is not defined. Make the variable with "
            "aggregation='only_first_replica', or call it outside run."
        )
    parts = home.every((rows, updates))
    all_rows, all_updates = torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])
    return all_rows, all_updates / home.num_replicas if how is VariableAggregation.MEAN else all_updates


def apply(method: str, own: torch.Tensor, rows: torch.Tensor, updates: torch.Tensor) -> None:
    """Change the rows in place. A row that is named several times is changed several times, in order."""
    with torch.no_grad():
        if method in ("scatter_add", "scatter_sub"):
            own.index_add_(0, rows, updates, alpha=1 if method == "scatter_add" else -1)
            return
        # torch's own functions for these are in beta, and warn about it.
        change = _CHANGES[method]
        if len(rows.unique()) == len(rows):
            own[rows] = change(own[rows], updates)
            return
        for row, update in zip(rows.tolist(), updates, strict=True):
            own[row] = change(own[row], update)


def _quotient(row: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    whole = not (row.is_floating_point() or row.is_complex())
    return torch.div(row, update, rounding_mode="trunc" if whole else None)


_CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scatter_update": lambda row, update: update,
    "scatter_min": torch.minimum,
    "scatter_max": torch.maximum,
    "scatter_mul": torch.mul,
    "scatter_div": _quotient,
}
