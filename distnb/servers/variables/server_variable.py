"""The representatives, in the coordinator and the workers, of variables whose values live on servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distnb.compat import torch_internals
from distnb.errors import ContextError, OptionError, StructureError
from distnb.runtime import contexts
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.shard_placement import Stored
from distnb.servers.variables.values_read import FILLING, part_read, parts_read, refused
from distnb.variables import scattering
from distnb.variables.settings import Settings, value_for
from distnb.variables.variable import Variable

__all__ = ["ServerVariable", "ShardedVariable", "represent"]

_SMALL_NBYTES = 1 << 20  # a variable up to this size is read whole, even if only some rows are needed


def represent(stored: Stored, settings: Settings, strategy: Any, *, rows_apart: bool = False) -> ServerVariable:
    """Return a new representative of a variable in this process.

    Args:
        rows_apart: Whether the variable is a table, whose rows are read on demand.
    """
    cls = ShardedVariable if rows_apart or len(stored.parts) > 1 else ServerVariable
    # A meta tensor takes no memory. The value is read when it is used.
    empty = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    variable: ServerVariable = torch_internals.make_subclass(cls, empty, settings.trainable)
    variable._settings, variable._strategy, variable.number = settings, strategy, stored.number
    variable.stored, variable._gradient = stored, None
    variable.sparse_gradients = False
    return variable


class ServerVariable(Variable):
    """A variable on a parameter server; see `distnb.Variable`, which makes it in a ParameterServerStrategy's scope.

    The methods that read (`read_value`, `numpy`, `float`) return the server's current value. In torch operations the
    variable represents its value. In a scheduled function this is the value at the start of the function, or after the
    function's own changes. `assign`, `assign_add`, `assign_sub` and `scatter_*` change the variable on the server. Each
    change is atomic, so no worker's change is lost. If a worker is lost and its function runs again, the change is
    still made only once.

    Attributes:
        stored: The description of the variable on the servers.
        sparse_gradients: Whether gradients of single rows reach the optimizer as sparse tensors.
    """

    stored: Stored
    sparse_gradients: bool
    is_meta = False  # torch and other libraries warn that values copied into a meta tensor are lost; here they are not
    _gradient: torch.Tensor | None

    # Properties -----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> ServerVariable:
        """The same variable without gradients."""
        settings = replace(self._settings, trainable=False)
        empty = torch.empty(self.stored.shape, dtype=self.dtype, device="meta")
        other: ServerVariable = torch_internals.make_subclass(type(self), empty, False)
        vars(other).update({**vars(self), "_settings": settings, "_gradient": None, "_kept": self})
        return other

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            self.assign(value)

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The server in TensorFlow's spelling: `/job:ps/replica:0/task:1/device:CPU:0`."""
        return self.stored.parts[0].device

    @property
    def name(self) -> str | None:
        """The name given by the user, or None. The name of a shard includes its number: `name/part_0`."""
        return self.stored.name if self._settings.name else None

    @property
    def grad(self) -> torch.Tensor | None:
        """The sum of the gradients of all backward passes. It is sparse if only single rows were read."""
        return self._gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._gradient = value

    @grad.deleter
    def grad(self) -> None:
        self._gradient = None

    def _add_gradient(self, gradient: torch.Tensor) -> None:
        if self._gradient is None:
            self._gradient = gradient
        elif gradient.is_sparse and not self._gradient.is_sparse:
            self._gradient = self._gradient + gradient
        else:
            self._gradient = gradient + self._gradient

    def register_hook(self, hook: Any) -> Any:
        """Raise OptionError: the gradient belongs to the values that were read, not to the variable."""
        raise OptionError(
            f"{self._settings.label} is on a parameter server, and its gradient does not pass through the variable. "
            "Change its `grad` after the backward pass instead of registering a hook."
        )

    register_post_accumulate_grad_hook = register_hook

    # Reading --------------------------------------------------------------------------------------------------------

    def _seen(self, method: str) -> torch.Tensor:
        self._strategy.home.in_replica(writing=False)
        value: torch.Tensor = servers_here.access.requests.read(self.stored)
        return value

    def read_value(self) -> torch.Tensor:
        """Return the current value as a new tensor."""
        return self._seen("read_value")

    value = read_value

    def _operand(self, name: str) -> torch.Tensor:
        self._strategy.home.in_replica(writing=False)
        tensor: torch.Tensor = servers_here.access.copies.cached(self.stored)
        tensor.requires_grad_(self.requires_grad)
        if tensor.requires_grad and not torch_internals.has_gradient_hook(tensor):
            tensor.register_post_accumulate_grad_hook(self._add_gradient_of)
        return tensor

    def _result_of(self, operand: torch.Tensor, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        return parts_read(self, operand, result)

    def _add_gradient_of(self, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self._add_gradient(leaf.grad)
        leaf.grad = None

    def _is_table(self) -> bool:
        """Return whether indexing reads only the requested rows."""
        return self.numel() * self.dtype.itemsize > _SMALL_NBYTES

    def lookup(
        self, rows: torch.Tensor, *, sparse: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read some rows, each once, with one message to each server that holds some of them.

        For example, `lookup(tensor([5, 2, 5]))` returns `[2, 5]`, the values of rows 2 and 5, and `[1, 0, 1]`.

        Args:
            rows: The row numbers, in any shape and order. A number may occur several times.
            sparse: Whether the gradient reaches the optimizer as a sparse tensor. None: as in the last call.

        Returns:
            The distinct row numbers `[k]`, ascending; the rows' values `[k, ...]`, which collect gradients if the
            variable is trainable; and the position in these `k` rows of each number in `rows`, in the shape of `rows`.

        Raises:
            IndexError: A row number is out of range.
        """
        self._strategy.home.in_replica(writing=False)
        unique, inverse = torch.unique(rows.long(), return_inverse=True)
        if unique.numel() and not (int(unique[0]) >= 0 and int(unique[-1]) < self.shape[0]):
            raise IndexError(
                f"Rows {int(unique[0])} to {int(unique[-1])} were asked for of {self.stored.name or 'a variable'}, "
                f"which has rows 0 to {self.shape[0] - 1}."
            )
        values = servers_here.access.requests.read_rows(self.stored, unique)
        if sparse is not None:
            self.sparse_gradients = sparse
        if self.requires_grad and torch.is_grad_enabled():
            values.requires_grad_()

            def add_rows(leaf: torch.Tensor) -> None:
                assert leaf.grad is not None
                self._add_gradient(
                    torch_internals.sparse_tensor(
                        unique.to(leaf.grad.device)[None],
                        leaf.grad,
                        self.shape,
                        is_coalesced=True,  # each row occurs once, in order
                    )
                )

            values.register_post_accumulate_grad_hook(add_rows)
        return unique, values, inverse

    def _rows_at(self, rows: torch.Tensor) -> torch.Tensor:
        _, values, inverse = self.lookup(rows)
        return values[inverse]

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._rows_of(index)
        if found is None:
            part = super().__getitem__(index)
            return part_read(part, self, index % self.shape[0]) if type(index) is int else part
        rows, inner = found
        _, values, inverse = self.lookup(rows)
        chosen = values[(inverse if inner is None else inner, *_rest(index))]
        if inner is None and not _is_backwards(_first(index)):
            return chosen
        return part_read(chosen, self, int(rows) if inner == 0 and not _rest(index) else None)

    def _rows_of(self, index: Any) -> tuple[torch.Tensor, Any] | None:
        """Return the rows that an index selects, and the index to apply to these rows.

        The index is None if the caller shall use each row's position in the distinct, ascending rows instead, as
        `lookup` returns it. Examples for a table with 100 rows:

            v[3]          rows [3],       index 0
            v[10:13]      rows [10..12],  index slice(None)
            v[[7, 2, 7]]  rows [7, 2, 7], index None: torch returns a copy

        The whole result is None if the whole value is needed, as in `v[...]` and for small variables.
        """
        first = _first(index)
        if not self.dim() or first is None or first is Ellipsis or isinstance(first, bool):
            return None
        if not self._is_table() and not _is_backwards(first):
            return None
        shown = first.cpu().numpy() if isinstance(first, torch.Tensor) else first
        rows = torch.from_numpy(np.asarray(np.arange(self.shape[0])[shown]).copy())
        basic = rows.dim() == 0 or isinstance(first, slice)
        if not basic or _is_backwards(first):
            return rows, None
        return rows.reshape(-1), slice(None) if rows.dim() else 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    # Assigning ------------------------------------------------------------------------------------------------------

    def _write(self, method: str, value: Any) -> Any:
        home = self._strategy.home
        in_replica = home.in_replica(writing=True)
        new = value_for(self.stored.like(), self._settings.label, method, value)
        if in_replica and not home.alone:
            new = self._from_replica(home, new, method)
        servers_here.access.requests.write(self.stored, method, new)
        return self

    def _scatter(self, method: str, indices: Any, updates: Any = None) -> Any:
        home = self._strategy.home
        in_replica = home.in_replica(writing=True)
        rows, changes = scattering.parse_scatter(self.stored.like(), self._settings.label, method, indices, updates)
        if in_replica and not home.alone:
            rows, changes = scattering.combine_replicas(home, self._settings, method, rows, changes)
        servers_here.access.requests.write_rows(self.stored, method, rows, changes)
        return self

    def _is_elsewhere(self) -> bool:
        return True

    def _change_whole(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = tuple(args[1:]), {key: value for key, value in kwargs.items() if key != "tensor"}
        if name == "copy_":
            return self.assign(args[0])
        if name not in FILLING:
            raise self._refused(name)
        self._refuse_in_replicas(name)
        servers_here.access.requests.fill(self.stored, lambda piece: function(piece, *args, **kwargs))
        return self

    def _refused(self, what: str) -> ContextError:
        return refused(self, what)

    def _refuse_in_replicas(self, what: str) -> None:
        """Raise ContextError if each replica of a worker would make the same change."""
        home = self._strategy.home
        if home.in_replica(writing=True) and not home.alone:
            raise ContextError(
                f"{what} of {self._settings.label} in a function that strategy.run calls: each replica would change "
                "the one variable. Use assign, assign_add or assign_sub of a variable that was made with an "
                "aggregation, such as aggregation='sum'; or change it outside run."
            )

    # In torch's operations ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _LOOKUPS and isinstance(args[1], ServerVariable):
            return _LOOKUPS[function](*args, **(kwargs or {}))
        if function is torch.full_like and contexts.innermost() is not None and args[0]._is_table():
            # Adagrad creates its state this way, and the state of a table may exceed this process's memory.
            return torch.full((), args[1], dtype=args[0].dtype).expand(args[0].shape)
        return super().__torch_function__(function, types, args, kwargs)

    # Representation and copying -------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = self.stored.parts[0].device if len(self.stored.parts) == 1 else f"{len(self.stored.parts)} shards"
        name = f" {self.stored.name!r}" if self.stored.name else ""
        return f"<{type(self).__name__}{name} {list(self.shape)} {self.dtype} on {where}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.read_value(), self.trainable)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter, (self.read_value(), self.trainable)


class ShardedVariable(ServerVariable):
    """A variable whose rows are divided among several servers, or whose rows are read on demand.

    In torch operations it represents the whole value, which must then be fetched from all servers. Indexing,
    `distnb.nn.embedding_lookup` and `torch.nn.Embedding` fetch only the rows that they need.
    """

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The device of the value, or of its rows, in torch operations. A shard's own `device` is its server's."""
        return servers_here.access.device

    @property
    def variables(self) -> list[ServerVariable]:
        """The shards in order, as variables named `name/part_0`, `name/part_1` and so on."""
        return [_shard(self, number) for number in range(len(self.stored.parts))]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.variables)

    def _write(self, method: str, value: Any) -> Any:
        shape = np.shape(value) if not isinstance(value, torch.Tensor) else tuple(value.shape)
        if shape not in ((), self.stored.shape):
            raise StructureError(
                f"{method} of the sharded {self._settings.label} got a value of shape {list(shape)}, and it has the "
                f"shape {list(self.stored.shape)}."
            )
        return super()._write(method, value)

    def _is_table(self) -> bool:
        return True


class _Shard(ServerVariable):
    """A part of a sharded variable: a view of its rows."""

    whole: ShardedVariable

    @property
    def _table(self) -> ShardedVariable:
        return self.whole

    def _operand(self, name: str) -> torch.Tensor:
        return self._seen(name)


def _shard(whole: ShardedVariable, place: int) -> ServerVariable:
    shard: Any = represent(whole.stored.only(place), whole._settings, whole.distribute_strategy)
    shard.__class__, shard.whole = _Shard, whole
    return shard  # type: ignore[no-any-return]


def _first(index: Any) -> Any:
    return (index[0] if index else Ellipsis) if isinstance(index, tuple) else index


def _rest(index: Any) -> tuple[Any, ...]:
    return index[1:] if isinstance(index, tuple) else ()


def _is_backwards(index: Any) -> bool:
    """Return whether an index is a slice with a negative step, which torch does not support."""
    return isinstance(index, slice) and index.step is not None and index.step < 0


# -- torch functions that look up rows ---------------------------------------------------------------------------------


def _embedding(
    input: torch.Tensor,
    weight: ServerVariable,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    _refuse_renormalising(max_norm)
    unique, values, inverse = weight.lookup(input, sparse=sparse)
    padding = _place_of(padding_idx, unique, weight)
    return torch.nn.functional.embedding(inverse, values, padding, None, norm_type, scale_grad_by_freq, False)


def _embedding_bag(
    input: torch.Tensor,
    weight: ServerVariable,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    _refuse_renormalising(max_norm)
    unique, values, inverse = weight.lookup(input, sparse=sparse)
    return torch.nn.functional.embedding_bag(
        inverse,
        values,
        offsets,
        None,
        norm_type,
        scale_grad_by_freq,
        mode,
        False,
        per_sample_weights,
        include_last_offset,
        _place_of(padding_idx, unique, weight),
    )


def _place_of(row: int | None, unique: torch.Tensor, weight: ServerVariable) -> int | None:
    """Return the position, in the rows that were read, of the padding row, which gets no gradient. None: not read."""
    if row is None:
        return None
    found = (unique == row % weight.shape[0]).nonzero()
    return int(found[0, 0]) if len(found) else None


def _refuse_renormalising(max_norm: float | None) -> None:
    if max_norm is not None:
        raise OptionError(
            "max_norm changes the rows of an embedding when they are read, and several workers read them at once. "
            "Leave it out, or scale the rows that you have read."
        )


_LOOKUPS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.embedding: _embedding,
    torch.nn.functional.embedding_bag: _embedding_bag,
}
