"""Parts of the value that a variable on servers was read as: they cannot be changed in place.

`v[0]` is a view of a copy of the servers' value. A change of it would be lost, so it raises an error with the cure.
Only a row can be filled, because libraries set the initial value of an embedding's padding row so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distnb.errors import ContextError
from distnb.variables.intercepted import Intercepted

if TYPE_CHECKING:
    from distnb.servers.variables.server_variable import ServerVariable

__all__ = ["FILLING", "PartRead", "part_read", "parts_read", "refused"]

FILLING = frozenset(
    {"normal_", "uniform_", "constant_", "trunc_normal_", "ones_", "zeros_", "zero_", "fill_", "exponential_"}
    | {"cauchy_", "log_normal_", "random_"}
)
"""The functions that set a tensor without reading it. They assign a new value to a variable."""


class PartRead(Intercepted, torch.Tensor):
    """A tensor that shares memory with a variable's value in this process. Reads work as with any other tensor."""

    _variable: ServerVariable
    _row: int | None  # the number of the row that this is; None: another part

    @property
    def data(self) -> torch.Tensor:
        """The same part without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise self._refused("data")

    def _operand(self, name: str) -> torch.Tensor:
        return self

    def _result_of(self, operand: torch.Tensor, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        return parts_read(self._variable, operand, result)

    def _is_elsewhere(self) -> bool:
        return True

    def _change_whole(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._row is None or name not in FILLING:
            raise self._refused(name)
        row = torch.empty(self.shape, dtype=self.dtype)
        with torch.no_grad():
            function(row, *args[1:], **{key: value for key, value in kwargs.items() if key != "tensor"})
        self._variable.scatter_update([self._row], row[None])
        return part_read(row.to(self.device), self._variable, self._row)

    def _refused(self, what: str) -> ContextError:
        return refused(self._variable, f"{what} of a part")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_plain(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return _plain(self).__deepcopy__(memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def refused(variable: ServerVariable, what: str) -> ContextError:
    """Return the error for a change in place."""
    return ContextError(
        f"{what} of {variable._settings.label} is not possible: the variable lives on parameter servers, and this "
        "process has only a copy. Use assign, assign_add or assign_sub for the whole variable, and scatter_update, "
        "scatter_add or another scatter_ method for rows: variable.scatter_add([0], [1.0]) instead of variable[0] += 1."
    )


def part_read(tensor: torch.Tensor, variable: ServerVariable, row: int | None = None) -> PartRead:
    """Return a tensor as a part of a variable's value; `row` is the number of the row that it is, if it is one."""
    with torch._C.DisableTorchFunctionSubclass():
        part: PartRead = tensor.as_subclass(PartRead)
    part._variable, part._row = variable, row
    return part


def parts_read(variable: ServerVariable, operand: torch.Tensor, result: Any) -> Any:
    """Return a function's result, in which tensors that share memory with the operand cannot be changed."""
    if isinstance(result, np.ndarray):
        return result.copy()  # a change of the array could not be detected and would be lost
    if isinstance(result, torch.Tensor):
        return part_read(result, variable) if _shares_memory(result, operand) else result
    if type(result) in (tuple, list) and any(_shares_memory(each, operand) for each in result):
        return type(result)(part_read(each, variable) if _shares_memory(each, operand) else each for each in result)
    return result


def _plain(part: PartRead) -> torch.Tensor:
    """Return a plain `torch.Tensor` that shares the part's memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return part.as_subclass(torch.Tensor)


def _shares_memory(result: Any, operand: torch.Tensor) -> bool:
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or result.device != operand.device:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return result.numel() > 0 and result.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()
