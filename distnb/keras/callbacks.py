"""Callbacks: the chief's act, for all replicas, which take over what they did to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
import xxhash

from distnb.keras import compat
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.this_process import this_process
from distnb.strategies.live import live

__all__ = ["Together"]

_RARE = ("train_begin", "train_end", "test_begin", "test_end", "predict_begin", "predict_end")
_BATCHES = tuple(f"{kind}_batch_{when}" for kind in ("train", "test", "predict") for when in ("begin", "end"))
# These read the model at the end of batches, and write files.
_READ_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
)


class Together(keras.callbacks.Callback):  # type: ignore[misc]
    """Stands for the user's callbacks on every replica.

    They are called on replica 0, once, as by Keras. What they change (weights, the optimizer's variables, the end of
    training, the epoch to begin with) is every replica's when the call has ended: after those for epochs and for the
    whole training everything; after those for batches, which come often, the end of training and the learning rate.

    Attributes:
        acting: Whether the user's callbacks are being called: what they ask of the model is for this replica alone.
    """

    def __init__(self, model: Any, callbacks: Any) -> None:
        super().__init__()
        self.acting = False
        process = this_process.replica
        assert process is not None
        self._is_chief = process.rank == 0
        self._own = keras.callbacks.CallbackList(callbacks if self._is_chief else None, model=model)
        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
        self._any = bool(given)
        plain = keras.callbacks.Callback
        self._changing = {
            name
            for name in _BATCHES
            for each in given
            if not isinstance(each, _READ_ONLY) and getattr(type(each), f"on_{name}") is not getattr(plain, f"on_{name}")
        }

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._own.set_params(params)

    def _call(self, name: str, *args: Any) -> None:
        if self._is_chief:
            self.acting = True
            try:
                getattr(self._own, f"on_{name}")(*args)
            finally:
                self.acting = False

    # Often ----------------------------------------------------------------------------------------------------------------

    def _batch(self, name: str, batch: int, logs: Any) -> None:
        self._call(name, batch, logs)
        if name in self._changing:
            self._take_over_little()

    def _take_over_little(self) -> None:
        process = this_process.replica
        assert process is not None
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        rate = getattr(optimizer, "_learning_rate", None)
        is_variable = isinstance(rate, keras.Variable)
        told = torch.tensor([float(model.stop_training), float(rate) if is_variable else 0.0], dtype=torch.float64)
        process.group.broadcast(told)
        model.stop_training = bool(told[0])
        if is_variable and not self._is_chief:
            rate.assign(float(told[1]))

    # Rarely ---------------------------------------------------------------------------------------------------------------

    def _rare(self, name: str, *args: Any) -> None:
        before = self._digests() if self._any and self._is_chief else {}
        self._call(name, *args)
        if self._any:
            self._take_over_all(before)

    def _variables(self) -> dict[str, torch.Tensor]:
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        every = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
        return {f"{number} {each.path}": each.value for number, each in enumerate(every)}

    def _digests(self) -> dict[str, bytes]:
        return {name: _digest(value) for name, value in self._variables().items()}

    def _take_over_all(self, before: dict[str, bytes]) -> None:
        process = this_process.replica
        assert process is not None
        told: Any = None
        model = self.model
        if self._is_chief:
            changed = {
                name: value.detach().cpu()
                for name, value in self._variables().items()
                if before.get(name) != _digest(value)
            }
            told = changed, bool(model.stop_training), compat.initial_epoch(model)
        changed, model.stop_training, epoch = broadcast_tree(process.group, told, 0)
        if self._is_chief:
            return
        compat.set_initial_epoch(model, epoch)
        here = self._variables()
        with torch.no_grad():
            for name, value in changed.items():
                here[name].copy_(value)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._rare("epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._rare("epoch_end", epoch, logs)


def _digest(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return xxhash.xxh3_128_digest(data)


def _rare(name: str) -> Callable[..., None]:
    def call(self: Together, logs: Any = None) -> None:
        self._rare(name, logs)

    return call


def _batch(name: str) -> Callable[..., None]:
    def call(self: Together, batch: int, logs: Any = None) -> None:
        self._batch(name, batch, logs)

    return call


for _name in _RARE:
    setattr(Together, f"on_{_name}", _rare(_name))
for _name in _BATCHES:
    setattr(Together, f"on_{_name}", _batch(_name))
