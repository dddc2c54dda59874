"""A forward pass on all replicas: each computes its rows of the batch, and all receive the outputs of all rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.collectives.group.eager import always_eager
from distnb.collectives.group.interface import Group
from distnb.collectives.verify import callsite
from distnb.errors import GradientError, StructureError
from distnb.keras import keras_internals
from distnb.runtime import contexts
from distnb.runtime.this_process import this_process
from distnb.values.structure import flatten, map_structure

__all__ = ["SharedForward"]


class SharedForward:
    """Division of the calls of some Keras layers among the replicas during a step, for calls that no other call
    contains.

    Attributes:
        rows: The start and end of this replica's rows in the last batch, and the size of that batch.
        under_way: Whether calls are divided now.
    """

    def __init__(self) -> None:
        self.rows = (0, 0, 0)
        self.under_way = False
        self._depth = 0
        self._execution: contexts.Execution | None = None
        self._checked = False
        self._parts: set[Any] = set()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Divide calls within the context."""
        before = self.under_way
        self._parts.clear()
        try:
            self.under_way, self._depth = True, 0
            yield
        finally:
            self.under_way = before

    def watch(self, layers: Sequence[Any]) -> None:
        """Divide the calls of these layers, too."""
        for layer in layers:
            if layer not in self._watched:
                self._watched.add(layer)
                layer.register_forward_pre_hook(self._before, with_kwargs=True)
                layer.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    # The graph of a loss --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check the next loss again, because steps of another program may follow."""
        self._checked = False

    def mark_part(self, term: torch.Tensor) -> None:
        """Mark a term of a loss as a replica's part, though no layer returned it."""
        self._parts.add(term.grad_fn)

    def check_loss(self, roots: Sequence[Any]) -> GradientError | None:
        """Return the error for a loss that also depends on weights outside all layers: every replica computes that term
        whole.
        """
        if self._checked:
            return None
        self._checked = True
        waiting: list[Any] = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
        seen: set[Any] = {None, *self._parts}
        while waiting:
            node = waiting.pop()
            if node in seen or node.name() == f"{_Gather.__name__}Backward":
                continue
            seen.add(node)
            if find_mirror(getattr(node, "variable", None)) is not None:
                return GradientError(
                    f"The loss at {callsite.current()} uses weights directly, and not only the outputs of the model or "
                    "its layers. Every replica would add that term, but only its part of the others. Let a layer add "
                    "the term (kernel_regularizer, self.add_loss), or use the weights within a layer."
                )
            waiting.extend(following for following, _ in node.next_functions)
        return None

    # The calls of layers --------------------------------------------------------------------------------------------

    @always_eager
    def _before(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.under_way:
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        self._execution = contexts.execution()
        process = this_process.replica
        assert process is not None
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors:
            raise StructureError(f"{layer.name} was called without a tensor whose rows could be divided.")
        whole = tensors[0].shape[0]
        begin, end = _part(whole, process.rank, process.size)
        self.rows = begin, end, whole
        # Layers need not support an empty batch: one row is computed, and then dropped.
        first, last = (begin, end) if end > begin else (0, 1)
        if self._execution is not None:
            contexts.execute(self._execution._replace(kind="split", counts=end > begin))

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != whole:
                return leaf
            return keras_internals.with_mask_of(leaf[first:last], leaf, first, last)

        return map_structure(own, args), map_structure(own, kwargs)

    @always_eager
    def _after(self, layer: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        if not self.under_way:
            return None
        self._depth -= 1
        if self._depth:
            return None
        contexts.execute(self._execution)
        if output is None:  # the layer raised
            return None
        process = this_process.replica
        assert process is not None
        begin, end, whole = self.rows
        parts = [_part(whole, rank, process.size) for rank in range(process.size)]
        computed = max(end - begin, 1)

        def together(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not leaf.dim() or leaf.shape[0] != computed:
                raise StructureError(
                    f"{layer.name} was given {computed} rows of a batch and returned a tensor of shape "
                    f"{list(leaf.shape)}. Each replica computes some rows: every output needs one row for each."
                )
            gathered = _Gather.apply(process.group, parts, leaf[: end - begin])  # type: ignore[no-untyped-call]
            mask = keras_internals.mask_of(leaf)
            if mask is not None:
                mask = _gathered(process.group, parts, mask[: end - begin])
            return keras_internals.set_mask(gathered, mask)

        return map_structure(together, output)


def _part(whole: int, rank: int, replicas: int) -> tuple[int, int]:
    """Return the start and end of a replica's rows. The parts are as even as possible, the first ones larger."""
    each, more = divmod(whole, replicas)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


def _gathered(group: Group, parts: Sequence[tuple[int, int]], own: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all replicas, which may differ in number."""
    most = max(end - begin for begin, end in parts)
    padded = own.detach()
    if len(own) < most:
        padded = torch.cat([padded, padded.new_zeros((most - len(own), *own.shape[1:]))])
    pieces = group.all_gather(padded.contiguous())
    return torch.cat([piece[: end - begin] for piece, (begin, end) in zip(pieces, parts, strict=True)])


class _Gather(torch.autograd.Function):
    """Gathering of all rows. Every replica continues with all of them equally, so the gradient of its own rows is in
    the gradient that it receives.
    """

    @staticmethod
    def forward(ctx: Any, group: Group, parts: Sequence[tuple[int, int]], own: torch.Tensor) -> torch.Tensor:
        ctx.begin, ctx.end = parts[group.rank]
        return _gathered(group, parts, own)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return None, None, upstream[ctx.begin : ctx.end]
