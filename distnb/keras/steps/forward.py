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

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distnb.checkpoint.tensor_slices import is_sharded
from distnb.collectives.eager import always_eager
from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.collectives.gradients.replicated_steps import replicating
from distnb.collectives.verify import callsite
from distnb.errors import GradientError, StructureError
from distnb.keras import keras_internals
from distnb.keras.steps.divided_call import DividedCall
from distnb.keras.steps.rows import DivideRows, GatherRows, Rows, WholeLoss
from distnb.runtime import contexts
from distnb.runtime.randomness import streams
from distnb.runtime.replica_context import ReplicaContext
from distnb.runtime.this_process import this_process
from distnb.values.structure import flatten, map_structure

__all__ = ["SharedForward"]

_DIVIDED = (f"{GatherRows.__name__}Backward", f"{WholeLoss.__name__}Backward")
"""The nodes behind which the graph is divided."""


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
        self._before_gathering: Callable[[], None] = _nothing
        self._depth = 0
        self._call: DividedCall | None = None
        self._entries: list[Any] = []
        self._visited: set[Any] = set()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def step(self, before_gathering: Callable[[], None]) -> Iterator[None]:
        """Divide calls within the context, in `strategy.run`. The rest of the step sees a single replica.

        `before_gathering` is called when a replica has computed its rows of a call, and at the end of the step.
        """
        before = contexts.innermost()
        assert before is not None
        self._strategy, self._replica = before
        self._before_gathering = before_gathering
        self.rows = self._depth = 0
        alone = ReplicaContext(self._strategy)
        try:
            with replicating(self), contexts.enter_replica(self._strategy, alone), streams.shared():
                yield
            before_gathering()
        finally:
            if self._call is not None:  # an interrupt ended the step in a call
                self._call.leave()
            self._call = self._replica = None
            self._before_gathering = _nothing
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
        rows = Rows.of(batch.shape[0])
        self.rows = rows.own
        self._call = DividedCall(layer, rows, self._strategy, self._replica)

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
        self._before_gathering()
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
            whole = GatherRows.apply(self, rows, leaf)  # type: ignore[no-untyped-call]
            return keras_internals.set_mask(whole, None if mask is None else rows.gathered(mask))

        whole = map_structure(together, output)
        call.combine_state()
        return whole

    def divide(self, rows: Rows, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows that this replica computes."""
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return whole[rows.computed]
        own: torch.Tensor = DivideRows.apply(self, rows, whole)  # type: ignore[no-untyped-call]
        self._entries.append(own.grad_fn)
        return own

    # Backward passes ------------------------------------------------------------------------------------------------

    def begin_pass(self, roots: Sequence[torch.Tensor]) -> None:
        """Divide what the replicated parts of the graph add to parameters by the number of replicas."""
        if self._depth:
            return  # a layer differentiates something in its call
        process = this_process.replica
        assert process is not None
        waiting = [getattr(root, "grad_fn", None) for root in roots]
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


def _nothing() -> None:
    """Do nothing between steps."""


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _scaling(factors: Sequence[float | None]) -> Callable[..., Any]:
    """Return a hook of a node that multiplies the gradients of some of its inputs."""

    def hook(gradients: Sequence[Any], _upstream: Any) -> Any:
        pairs = zip(gradients, factors, strict=True)
        return tuple(each if each is None or factor is None else each * factor for each, factor in pairs)

    return hook
