"""Keras 3 on its torch backend, in strategies: a model that was made in a scope trains on all replicas.

Every replica runs the whole of `fit`, `evaluate` and `predict` on global batches, as Keras has them. Only the forward
pass is divided: each replica computes its rows, and the outputs are gathered. All replicas therefore compute the same
losses and metrics, of the whole batch. Nothing imports this package before Keras is imported.
"""

from distnb.keras.callbacks.epoch_dots import EpochDots
from distnb.keras.callbacks.tensorboard import TensorBoard
from distnb.keras.data import DatasetCreator
from distnb.keras.keras_internals import check_backend

check_backend()

__all__ = ["DatasetCreator", "EpochDots", "TensorBoard"]
