"""Parameters whose values are kept for a while, on the replicas that need none: replica 0 sends its own.

    weight = TransientTensor.of(torch.empty(10_000, 1000), recent)
    weight.normal_()                        the same numbers as on replica 0
    float(weight.norm())                    the same number
    ...                                     more parameters: `recent` drops the values of those made long ago
    float(weight.norm())                    raises
    weight.mul_(2), weight[0], weight @ x   performed on shapes alone, and give tensors without values
    weight.normal_()                        has values again

So constructors do the same on all replicas, and the random numbers that they draw are equal.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from distnb.collectives.verify import callsite
from distnb.compat import torch_internals
from distnb.errors import ContextError

__all__ = ["RecentValues", "TransientTensor"]

_aten = torch.ops.aten
_FILLS = {
    *(_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default),
    *(_aten.log_normal_.default, _aten.cauchy_.default, _aten.geometric_.default, _aten.random_.default),
    *(_aten.random_.to, getattr(_aten.random_, "from")),
    *(_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default),
}
"""Functions that replace the whole content of their first argument."""

_NEED_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Memory:
    """The memory that a tensor shares with its views, as long as it has any.

    Attributes:
        nbytes: Its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._tensors: list[weakref.ref[TransientTensor]] = []

    def add(self, tensor: TransientTensor) -> None:
        """Note a tensor that uses this memory."""
        self._tensors.append(weakref.ref(tensor))

    def provide(self, base: torch.Tensor | None) -> None:
        """Give all tensors their values in a tensor that covers the memory, or none."""
        for each in [tensor for reference in self._tensors if (tensor := reference()) is not None]:
            each.kept = None
            if base is not None and each.dtype == base.dtype:
                each.kept = base.as_strided(each.shape, each.stride(), each.storage_offset())


class RecentValues:
    """The values that were used last.

    Args:
        limit_nbytes: The bytes to keep. The latest tensor has values even if it is larger.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._memories: dict[_Memory, None] = {}  # in the order of their use

    def use(self, memory: _Memory) -> None:
        """Note the use of a memory, and drop the values that were not used for longest."""
        self._memories.pop(memory, None)
        self._memories[memory] = None
        total = sum(each.nbytes for each in self._memories)
        for oldest in list(self._memories)[:-1]:
            if total <= self._limit_nbytes:
                return
            total -= oldest.nbytes
            self.drop(oldest)

    def drop(self, memory: _Memory) -> None:
        """Drop the values in a memory."""
        self._memories.pop(memory, None)
        memory.provide(None)

    def clear(self) -> None:
        """Drop all values."""
        for each in list(self._memories):
            self.drop(each)


class TransientTensor(torch.Tensor):
    """A tensor that may lose its values.

    Attributes:
        meta: A tensor on torch's meta device, of the same shape, strides and dtype.
        kept: An ordinary tensor with the values, or None.
        memory: The memory of the values.
        recent: The values that are kept.
    """

    meta: torch.Tensor
    kept: torch.Tensor | None
    memory: _Memory
    recent: RecentValues

    @staticmethod
    def __new__(
        cls,
        values: torch.Tensor | None,
        meta: torch.Tensor,
        device: torch.device,
        memory: _Memory,
        recent: RecentValues,
    ) -> TransientTensor:
        made: TransientTensor = torch_internals.make_wrapper(cls, meta, device)
        made.meta, made.kept, made.memory, made.recent = meta, values, memory, recent
        memory.add(made)
        return made

    @classmethod
    def of(cls, values: torch.Tensor, recent: RecentValues) -> TransientTensor:
        """Return a tensor that takes over the values of an ordinary one."""
        values = values.detach()
        if values.nbytes != values.untyped_storage().nbytes():
            values = values.clone()
        made = cls(values, _meta(values), values.device, _Memory(values.nbytes), recent)
        recent.use(made.memory)
        return made

    __torch_function__ = torch_internals.no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _perform(function, args, kwargs or {})

    @property
    def data(self) -> Any:
        """The tensor without a graph. `module.to(dtype)` assigns it."""
        return torch_internals.plain_data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        value = value if isinstance(value, TransientTensor) else TransientTensor.of(value, self.recent)
        torch_internals.plain_data.__set__(self, value)
        self.meta, self.kept, self.memory = value.meta, value.kept, value.memory
        self.memory.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.kept) if self.kept is not None else f"tensor(..., size={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self._read().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists of numbers."""
        return self._read().tolist()

    def _read(self) -> torch.Tensor:
        if self.kept is None:
            _refuse()
        self.recent.use(self.memory)
        return self.kept


def _perform(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [each for each in torch_internals.leaves((args, kwargs)) if isinstance(each, TransientTensor)]
    target = args[0] if args else None
    if function in _FILLS and isinstance(target, TransientTensor) and target.kept is None and _covers(target):
        empty = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
        others_have_values = all(each is target or each.kept is not None for each in given)
        target.memory.provide(empty if others_have_values else None)
    if all(each.kept is not None for each in given):
        return _perform_on_values(function, args, kwargs, given)
    return _perform_on_shapes(function, args, kwargs, given)


def _perform_on_values(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[TransientTensor]
) -> Any:
    for each in given:
        each.recent.use(each.memory)
    results = function(*torch_internals.map_leaves(_values, args), **torch_internals.map_leaves(_values, kwargs))
    known = {id(each.kept): each for each in given}
    sharing = {torch_internals.identity_of_storage(each.kept.untyped_storage()): each for each in given}  # type: ignore[union-attr]

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in known:
            return known.get(id(leaf), leaf)
        base = sharing.get(torch_internals.identity_of_storage(leaf.untyped_storage()))
        if base is None:
            return leaf
        meta = _meta(leaf)
        if leaf.dtype == base.dtype:
            meta = base.meta.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return TransientTensor(leaf, meta, leaf.device, base.memory, base.recent)

    return torch_internals.map_leaves(wrapped, results)


def _perform_on_shapes(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[TransientTensor]
) -> Any:
    written = torch_internals.written(function, args, kwargs)
    if _NEED_VALUES.intersection(function.tags) or any(not isinstance(each, TransientTensor) for each in written):
        _refuse()
    if torch.Tag.nondeterministic_seeded in function.tags:  # the generator advances as on replica 0
        function(*torch_internals.map_leaves(_scratch, args), **torch_internals.map_leaves(_scratch, kwargs))
        kwargs = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
    for each in written:
        each.recent.drop(each.memory)
    first = given[0]
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else first.device
    without_memory = {"device": torch.device("meta")} if "device" in kwargs else {}
    results = function(
        *torch_internals.map_leaves(_meta, args), **{**torch_internals.map_leaves(_meta, kwargs), **without_memory}
    )
    known = {id(each.meta): each for each in given}
    sharing = {torch_internals.identity_of_storage(each.meta.untyped_storage()): each.memory for each in given}

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in known or device.type == "meta":
            return known.get(id(leaf), leaf)
        storage = leaf.untyped_storage()
        memory = sharing.setdefault(torch_internals.identity_of_storage(storage), _Memory(storage.nbytes()))
        return TransientTensor(None, leaf, device, memory, first.recent)

    return torch_internals.map_leaves(wrapped, results)


def _values(leaf: Any) -> Any:
    return leaf.kept if isinstance(leaf, TransientTensor) else leaf


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, TransientTensor):
        return leaf.meta
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf  # torch mixes tensors without dimensions with those of any device


def _scratch(leaf: Any) -> Any:
    if not isinstance(leaf, TransientTensor):
        return leaf
    if leaf.kept is not None:
        return leaf.kept.clone()
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).zero_()


def _covers(tensor: TransientTensor) -> bool:
    """Return whether a tensor covers its memory."""
    return tensor.meta.numel() * tensor.meta.element_size() == tensor.memory.nbytes


def _refuse() -> NoReturn:
    raise ContextError(
        f"A program reads a tensor whose values only replica 0 still has, at {callsite.current()}. While large models "
        "are made in the scope of a ShardedStrategy, the other replicas keep the values of the parameters that they "
        "have used last. Read others after the scope; or, if a constructor needs them, make its model within "
        '`with torch.device("cpu"):` in the scope: then each replica makes all of it in host memory.'
    )
