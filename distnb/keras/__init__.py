"""Keras 3, on its torch backend, in strategies: a model that a scope made trains on all replicas.

`fit`, `evaluate` and `predict` run whole on every replica, on global batches, as Keras has them. Only the forward pass
is shared out: each replica computes its rows, and the outputs are brought together. So losses and metrics, whatever
they are, are those of the whole batch, and equal on all replicas. Nothing here is imported before Keras is.
"""

from distnb.keras.data import DatasetCreator
from distnb.keras.epoch_dots import EpochDots
from distnb.keras.keras_internals import check_backend
from distnb.keras.tensorboard import TensorBoard

check_backend()

__all__ = ["DatasetCreator", "EpochDots", "TensorBoard"]
