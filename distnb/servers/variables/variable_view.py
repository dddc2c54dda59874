"""Views of variables on servers. An in-place change of a view changes the variable on its server.

`v[0].add_(1)` changes `v`, as it does for any torch tensor. Here `v[0]` is a view of the value that this process has
read, which is only a copy. The view therefore records how it was derived from the variable, and the change is applied
to the same view of the servers' value:

    row = v[0]      derive = lambda value: value[0]
    row.add_(1)     on the servers' value: derive(value).add_(1), by `change_in_place`; then `row` shows the result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distnb.errors import ContextError
from distnb.servers.variables.here import servers_here
from distnb.values.structure import map_structure
from distnb.variables.intercepted import Intercepted

if TYPE_CHECKING:
    from distnb.servers.variables.server_variable import ServerVariable

__all__ = ["VariableView", "plain", "seen_through", "view_of"]

_LOCAL = frozenset({"__set__", "__delete__", "detach_", "share_memory_", "rename_"})
_RESHAPING = frozenset(
    {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "set_", "resize_"}
    | {"resize_as_", "apply_", "map_", "map2_"}
)

Derive = Callable[[torch.Tensor], torch.Tensor]


class VariableView(Intercepted, torch.Tensor):
    """A view of a variable that lives on servers. Reads work as with any other tensor.

    The view holds the value that was read and is not updated automatically.
    """

    _variable: ServerVariable
    _rows: torch.Tensor | None  # the variable's rows that this is a view of; None: all rows
    _derive: Derive | None  # returns the view, given the value of these rows; None: this tensor is a copy
    _index: Any = None  # the index, if this view is `variable[index]`
    _written_at: int | None = None  # `ServerAccess.exchanges` after the last in-place change of this view

    @property
    def data(self) -> torch.Tensor:
        """The same view without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._derive = None  # no longer a view of the variable

    def _operand(self, name: str) -> torch.Tensor:
        return self

    def _result_of(self, operand: torch.Tensor, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        return seen_through(self, operand, function, args, kwargs, result)

    def _is_elsewhere(self) -> bool:
        return True

    def _change_whole(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        rest, named = tuple(args[1:]), {key: value for key, value in kwargs.items() if key != "tensor"}
        if name in _LOCAL:
            with torch._C.DisableTorchFunctionSubclass():
                return function(self, *rest, **named)
        derive = self._derive
        if derive is None or name in _RESHAPING:
            raise self._refused(name)
        self._variable._refuse_in_replicas(name)
        servers = servers_here.access
        block = servers.change(self._variable.stored, lambda value: function(derive(value), *rest, **named), self._rows)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.detach(self).copy_(derive(block))
        self._written_at = servers.exchanges
        return None if name == "__setitem__" else self

    def _refused(self, what: str) -> ContextError:
        return ContextError(
            f"{what} of a part of {self._variable._settings.label} is not possible: the variable lives on parameter "
            "servers. Compute the new value first, and use assign or `variable[index] = value`."
        )

    def was_written_as(self, variable: ServerVariable, index: Any) -> bool:
        """Return whether this view is `variable[index]` and was changed in place just now.

        Python runs `variable[index] += 1` as `view = variable[index]; view += 1; variable[index] = view`. The second
        step has already changed the variable on the servers, so the assignment must not write the value again.
        """
        return (
            self._written_at == servers_here.access.exchanges
            and self._variable is variable
            and _same_index(self._index, index)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return plain(self).__deepcopy__(memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def plain(view: VariableView) -> torch.Tensor:
    """Return a plain `torch.Tensor` that shares the view's memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return view.as_subclass(torch.Tensor)


def view_of(
    tensor: torch.Tensor, variable: ServerVariable, rows: torch.Tensor | None, derive: Derive | None, index: Any = None
) -> VariableView:
    """Return a tensor as a view of a variable; see `VariableView`."""
    with torch._C.DisableTorchFunctionSubclass():
        view: VariableView = tensor.as_subclass(VariableView)
    view._variable, view._rows, view._derive, view._index = variable, rows, derive, index
    return view


def seen_through(
    source: ServerVariable | VariableView, operand: torch.Tensor, function: Any, args: Any, kwargs: Any, result: Any
) -> Any:
    """Return a function's result, in which tensors that share memory with the operand are turned into views.

    Args:
        source: The variable or view whose value is the operand.
        args, kwargs: The function's arguments.
    """
    if isinstance(result, np.ndarray):
        return result.copy()  # a change of the array could not be detected and would be lost
    if isinstance(result, torch.Tensor):
        if not _shares_memory(result, operand):
            return result
        return _viewed(source, operand, function, args, kwargs, result, None)
    if type(result) in (tuple, list) and any(_shares_memory(each, operand) for each in result):
        return type(result)(
            _viewed(source, operand, function, args, kwargs, each, place) if _shares_memory(each, operand) else each
            for place, each in enumerate(result)
        )
    return result


def _viewed(
    source: ServerVariable | VariableView,
    operand: torch.Tensor,
    function: Any,
    args: Any,
    kwargs: Any,
    result: torch.Tensor,
    place: int | None,
) -> VariableView:
    if isinstance(source, VariableView):
        variable, rows, before = source._variable, source._rows, source._derive
        if before is None:
            return view_of(result, variable, rows, None)
        index = None
    else:
        variable, rows, before = source, None, _itself
        index = args[1] if function is torch.Tensor.__getitem__ else None

    def derive(value: torch.Tensor) -> torch.Tensor:
        given = before(value)
        shown, named = map_structure(lambda leaf: given if leaf is operand else leaf, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*shown, **named)
        return found if place is None else found[place]  # type: ignore[no-any-return]

    return view_of(result, variable, rows, derive, index)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _shares_memory(result: Any, operand: torch.Tensor) -> bool:
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or result.device != operand.device:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return result.numel() > 0 and result.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()


def _same_index(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_index, one, other))
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (int, slice)) and one == other
