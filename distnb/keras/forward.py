"""A step on all replicas: each computes its rows of the calls of layers, and all compute the rest with the whole batch.

               replicated    |      divided: this replica's rows      |    replicated
    forward        x ────── divide ──▶ layer ──▶ rows of the output ── gather ──▶ output ──▶ loss
    backward  whole gradient ◀─ gather ──── this replica's part ◀───── divide ──── whole gradient

Divide and gather are each other's gradient, so all replicas have the same values and whole gradients wherever they
compute the same, in gradients of gradients, too. At the end of a backward pass the gradients of parameters are summed
over the replicas. A divided call contributes a part on every replica. What uses a parameter outside of such calls (a
regularizer, a penalty in `compute_loss`) contributes its whole gradient on every replica, so it is divided by their
number.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distnb.checkpoint.tensor_slices import is_sharded
from distnb.collectives.digests import digest
from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.collectives.gradients.replicated_steps import replicating
from distnb.collectives.group.eager import always_eager
from distnb.collectives.verify import callsite
from distnb.errors import GradientError, OptionError, StructureError
from distnb.keras import keras_internals
from distnb.runtime import contexts
from distnb.runtime.randomness import streams
from distnb.runtime.replica_context import ReplicaContext
from distnb.runtime.this_process import this_process
from distnb.values.structure import flatten, map_structure

__all__ = ["SharedForward"]


@dataclass(frozen=True)
class _Rows:
    """The division of a batch's rows among the replicas.

    Attributes:
        whole: The number of rows.
        parts: The start and end of each replica's rows, as even as possible, the first ones larger.
        rank: This replica.
    """

    whole: int
    parts: Sequence[tuple[int, int]]
    rank: int

    @classmethod
    def of(cls, whole: int) -> _Rows:
        """Divide the rows of a batch among the replicas."""
        process = this_process.replica
        assert process is not None
        each, more = divmod(whole, process.size)
        begins = [rank * each + min(rank, more) for rank in range(process.size + 1)]
        return cls(whole, list(itertools.pairwise(begins)), process.rank)

    @property
    def own(self) -> int:
        """The number of this replica's rows."""
        begin, end = self.parts[self.rank]
        return end - begin

    @property
    def counting(self) -> int:
        """The number of replicas that have rows."""
        return min(self.whole, len(self.parts))

    @property
    def computed(self) -> slice:
        """The rows that this replica computes. Layers need not support an empty batch: one row is computed, and then
        dropped.
        """
        begin, end = self.parts[self.rank]
        return slice(begin, end) if self.own else slice(0, 1)

    def gathered(self, computed: torch.Tensor) -> torch.Tensor:
        """Return the rows of all replicas, which may differ in number."""
        process = this_process.replica
        assert process is not None
        most = max(end - begin for begin, end in self.parts)
        padded = computed.detach()[: self.own]
        if self.own < most:
            padded = torch.cat([padded, padded.new_zeros((most - self.own, *computed.shape[1:]))])
        pieces = process.group.all_gather(padded.contiguous())
        return torch.cat([piece[: end - begin] for piece, (begin, end) in zip(pieces, self.parts, strict=True)])


class SharedForward:
    """Division of the calls of some Keras layers among the replicas during a step, for calls that no other call
    contains.

    Attributes:
        rows: The number of this replica's rows in the step's last call.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._strategy: Any = None
        self._replica: Any = None  # this replica's context during a step, otherwise None
        self._depth = 0
        self._call: _Call | None = None
        self._entries: list[Any] = []
        self._visited: set[Any] = set()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Divide calls within the context, in `strategy.run`. The rest of the step sees a single replica."""
        before = contexts.innermost()
        assert before is not None
        self._strategy, self._replica = before
        self.rows = self._depth = 0
        alone = ReplicaContext(self._strategy)
        try:
            with replicating(self), contexts.enter_replica(self._strategy, alone), streams.shared():
                yield
        finally:
            if self._call is not None:  # an interrupt ended the step in a call
                self._call.leave()
            self._call = self._replica = None
            self._entries.clear()
            self._visited.clear()

    def watch(self, layers: Sequence[Any]) -> None:
        """Divide the calls of these layers, too."""
        for layer in layers:
            if layer not in self._watched:
                self._watched.add(layer)
                layer.register_forward_pre_hook(self._before, with_kwargs=True)
                layer.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    # The calls of layers --------------------------------------------------------------------------------------------

    @always_eager
    def _before(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._replica is None:
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        batch = next(filter(_has_rows, flatten((args, kwargs))[0]), None)
        if batch is None:
            return None  # all replicas compute the whole call
        rows = _Rows.of(batch.shape[0])
        self.rows = rows.own
        self._call = _Call(layer, rows, self._strategy, self._replica)

        def own(leaf: Any) -> Any:
            if not _has_rows(leaf) or leaf.shape[0] != rows.whole:
                return leaf
            if isinstance(leaf, np.ndarray):
                return leaf[rows.computed]
            return keras_internals.with_mask_of(self.divide(rows, leaf), leaf, rows.computed)

        return map_structure(own, args), map_structure(own, kwargs)

    @always_eager
    def _after(self, layer: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        if self._replica is None:
            return None
        self._depth -= 1
        call = self._call
        if self._depth or call is None:
            return None
        self._call = None
        call.leave()
        if output is None:  # the layer raised
            return None
        rows = call.rows

        def together(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            computed = max(rows.own, 1)
            if not leaf.dim() or leaf.shape[0] != computed:
                raise StructureError(
                    f"{layer.name} was given {computed} rows of a batch and returned a tensor of shape "
                    f"{list(leaf.shape)}. Each replica computes some rows: every output needs one row for each."
                )
            mask = keras_internals.mask_of(leaf)
            whole = _GatherRows.apply(self, rows, leaf)  # type: ignore[no-untyped-call]
            return keras_internals.set_mask(whole, None if mask is None else rows.gathered(mask))

        whole = map_structure(together, output)
        call.combine_state()
        return whole

    def divide(self, rows: _Rows, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows that this replica computes."""
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return whole[rows.computed]
        own: torch.Tensor = _DivideRows.apply(self, rows, whole)  # type: ignore[no-untyped-call]
        self._entries.append(own.grad_fn)
        return own

    # Backward passes ------------------------------------------------------------------------------------------------

    def begin_pass(self, roots: Sequence[torch.Tensor]) -> None:
        """Divide what the replicated parts of the graph add to parameters by the number of replicas."""
        if self._depth:
            return  # a layer differentiates something in its call
        process = this_process.replica
        assert process is not None
        waiting = [root.grad_fn for root in roots]
        waiting += [node for entry in self._entries for node, _ in entry.next_functions]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._visited:
                continue
            self._visited.add(node)
            if node.name() in _DIVIDED:
                continue
            following = [each for each, _ in node.next_functions]
            direct = [find_mirror(getattr(each, "variable", None)) is not None for each in following]
            if any(direct):
                node.register_hook(_scaling([1 / process.size if each else None for each in direct]))
            waiting += [each for each, is_direct in zip(following, direct, strict=True) if not is_direct]

    def whole_gradients(
        self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], create_graph: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Sum the gradients of parameters that `torch.autograd.grad` returned over the replicas.

        Raises:
            GradientError: Gradients of these gradients are wanted, or a parameter is sharded.
        """
        found = list(gradients)
        mirrored = [place for place, each in enumerate(inputs) if find_mirror(each) is not None]
        places = [place for place in mirrored if found[place] is not None]
        sharded = any(is_sharded(each) for each in inputs)
        if self._depth or not (places or sharded):
            return tuple(found)
        if create_graph or sharded:
            raise GradientError(
                f"torch.autograd.grad at {callsite.current()} differentiates by a model's weights"
                + (", which are sharded" if sharded else " with create_graph=True")
                + ". On several replicas a Keras step can only do that by loss.backward()"
                + (". " if sharded else ", or without create_graph. ")
                + "Gradients by inputs and outputs of layers, and gradients of those, are possible."
            )
        with contexts.enter_replica(self._strategy, self._replica):
            summed = self._replica.all_reduce("sum", [found[place] for place in places])
        for place, total in zip(places, summed, strict=True):
            found[place] = total
        return tuple(found)


class _Call:
    """A divided call of a layer: in it this process is one replica of several, with its own random numbers."""

    def __init__(self, layer: Any, rows: _Rows, strategy: Any, replica: Any) -> None:
        self.rows = rows
        self._layer = layer
        self._before = {id(each): _version(each) for state in keras_internals.statistics(layer) for each in state}
        self._entered = ExitStack()
        self._entered.enter_context(contexts.enter_replica(strategy, replica))
        self._entered.enter_context(streams.own())
        execution = contexts.Execution(strategy, "split", counts=rows.own > 0, counting=rows.counting)
        self._entered.enter_context(contexts.executing(execution))

    def leave(self) -> None:
        """Return to the replicated part of the step."""
        self._entered.close()

    def combine_state(self) -> None:
        """Replace the losses that layers added, and the state that they changed, by those of the whole batch.

        Each replica computed them from its own rows. Losses are averaged by rows, and the statistics of Keras's own
        layers over the replicas that have rows. Other variables that are made without an aggregation must be equal.
        """
        added = list(map(keras_internals.added_losses, keras_internals.with_layers(self._layer)))
        losses = [loss for terms in added for loss in terms]
        of_keras, others = map(self._changed, keras_internals.statistics(self._layer))
        self._check_equal(others)
        statistics = list(map(keras_internals.tensor_of, of_keras))
        share = self.rows.own / max(self.rows.whole, 1)
        wholes = self._sum([(each, share) for each in losses] + [(each, self._weight()) for each in statistics])
        for terms in added:
            terms[:] = [_WholeLoss.apply(loss, next(wholes), share) for loss in terms]  # type: ignore[no-untyped-call]
        for statistic, whole in zip(statistics, wholes, strict=True):
            statistic.data.copy_(whole)  # hidden from autograd, which does not read the new value

    def _changed(self, state: Sequence[Any]) -> list[Any]:
        return [each for each in state if self._before.get(id(each)) != _version(each)]

    def _weight(self) -> float:
        """Return this replica's weight in a mean over the replicas that have rows."""
        return 1 / self.rows.counting if self.rows.own else 0.0

    def _sum(self, weighted: Sequence[tuple[torch.Tensor, float]]) -> Iterator[torch.Tensor]:
        """Return the sums of some tensors over the replicas, each with this replica's factor, in one message."""
        process = this_process.replica
        assert process is not None
        if not weighted:
            return iter(())
        flats = [(tensor.detach().reshape(-1).to(torch.float64), weight) for tensor, weight in weighted]
        # A replica without rows contributes nothing, even if its value is NaN.
        flat = torch.cat([each * weight if weight else torch.zeros_like(each) for each, weight in flats])
        process.group.all_reduce(flat)
        pieces = flat.split([len(each) for each, _ in flats])
        return (piece.reshape(t.shape).to(t.dtype) for piece, (t, _) in zip(pieces, weighted, strict=True))

    def _check_equal(self, changed: Sequence[Any]) -> None:
        """Check that the replicas gave variables equal values. A replica without rows takes those of replica 0.

        Raises:
            OptionError: The values differ.
        """
        process = this_process.replica
        assert process is not None
        if not changed:
            return
        tensors = [keras_internals.tensor_of(each).data for each in changed]
        mine = [digest(each) for each in tensors] if self.rows.own else None
        found = [each for each in process.group.all_gather_object(mine) if each is not None]
        differing = [each.path for place, each in enumerate(changed) if len({its[place] for its in found}) > 1]
        if differing:
            raise OptionError(
                f"{self._layer.name} gave different values to {', '.join(map(repr, differing))} on the replicas, each "
                "of which computes some rows of the batch. Say how they are combined where the variable is made: "
                "self.add_weight(..., trainable=False, aggregation='sum') for counts and sums over rows, 'mean' for "
                "statistics."
            )
        if len(found) < process.size:
            for each in tensors:
                process.group.broadcast(each)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _version(variable: Any) -> int:
    tensor = keras_internals.tensor_of(variable)
    return -1 if tensor is None or tensor.is_inference() else int(tensor._version)


def _scaling(factors: Sequence[float | None]) -> Callable[..., Any]:
    """Return a hook of a node that multiplies the gradients of some of its inputs."""

    def hook(gradients: Sequence[Any], _upstream: Any) -> Any:
        pairs = zip(gradients, factors, strict=True)
        return tuple(each if each is None or factor is None else each * factor for each, factor in pairs)

    return hook


class _GatherRows(torch.autograd.Function):
    """The rows of all replicas, from each replica's. Each replica's rows get their part of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, shared: SharedForward, rows: _Rows, own: torch.Tensor) -> torch.Tensor:
        ctx.shared, ctx.rows = shared, rows
        return rows.gathered(own)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        own = ctx.shared.divide(ctx.rows, upstream)
        return None, None, own if ctx.rows.own else own * 0


class _DivideRows(torch.autograd.Function):
    """The rows of a batch that this replica computes. Every replica gets the whole gradient of the batch."""

    @staticmethod
    def forward(ctx: Any, shared: SharedForward, rows: _Rows, whole: torch.Tensor) -> torch.Tensor:
        ctx.shared, ctx.rows = shared, rows
        return whole[rows.computed].clone()  # layers may overwrite their input

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return None, None, _GatherRows.apply(ctx.shared, ctx.rows, upstream)  # type: ignore[no-untyped-call]


class _WholeLoss(torch.autograd.Function):
    """A loss of the whole batch, which all replicas have, in place of the loss of this replica's rows."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, whole: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return upstream * ctx.share, None, None


_DIVIDED = (f"{_GatherRows.__name__}Backward", f"{_WholeLoss.__name__}Backward")
"""The nodes behind which the graph is divided."""
