"""A call of a layer that is divided among the replicas."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from distnb.collectives.digests import digest
from distnb.collectives.gradients.mean_loss import is_sum_over_rows
from distnb.errors import GradientError, OptionError
from distnb.keras import keras_internals
from distnb.keras.steps.rows import Rows, WholeLoss
from distnb.runtime import contexts
from distnb.runtime.randomness import streams
from distnb.runtime.this_process import this_process

__all__ = ["DividedCall"]

_checked: weakref.WeakSet[Any] = weakref.WeakSet()
"""The layers whose added losses were checked."""


class DividedCall:
    """A divided call of a layer: in it this process is one replica of several, with its own random numbers."""

    def __init__(self, layer: Any, rows: Rows, strategy: Any, replica: Any) -> None:
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
        layers = keras_internals.with_layers(self._layer)
        added = list(map(keras_internals.added_losses, layers))
        self._check_losses(layers, added)
        losses = [loss for terms in added for loss in terms]
        of_keras, others = map(self._changed, keras_internals.statistics(self._layer))
        self._check_equal(others)
        statistics = list(map(keras_internals.tensor_of, of_keras))
        share = self.rows.own / max(self.rows.whole, 1)
        wholes = self._sum([(each, share) for each in losses] + [(each, self._weight()) for each in statistics])
        for terms in added:
            terms[:] = [WholeLoss.apply(loss, next(wholes), share) for loss in terms]  # type: ignore[no-untyped-call]
        for statistic, whole in zip(statistics, wholes, strict=True):
            statistic.data.copy_(whole)  # hidden from autograd, which does not read the new value

    def _check_losses(self, layers: Sequence[Any], added: Sequence[Sequence[torch.Tensor]]) -> None:
        """Raise GradientError if a layer's loss is a sum over rows, when the layer first adds losses."""
        for layer, terms in zip(layers, added, strict=True):
            if layer in _checked or all(each.grad_fn is None for each in terms):
                continue
            _checked.add(layer)
            if any(is_sum_over_rows(each, self.rows.own) for each in terms):
                raise GradientError(
                    f"{layer.name} added a loss that is a sum over rows. Each replica computes it from its own rows, "
                    "and the losses of the replicas are averaged, as those that Keras's layers add, so it would be too "
                    "small. Divide it by the number of rows: self.add_loss(keras.ops.mean(...)), or "
                    "keras.ops.sum(...) / x.shape[0]."
                )

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


def _version(variable: Any) -> int:
    tensor = keras_internals.tensor_of(variable)
    return -1 if tensor is None or tensor.is_inference() else int(tensor._version)
