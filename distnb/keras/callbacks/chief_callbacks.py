"""Callbacks of Keras: they run on the chief, and all replicas receive their changes to the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import torch

from distnb.errors import CollectiveError, ContextError
from distnb.input.progress import Progress
from distnb.keras import keras_internals
from distnb.keras.callbacks.backups import Resuming
from distnb.keras.callbacks.callback_changes import MIRRORED, Changes, ModelBefore, make_changes
from distnb.keras.callbacks.callback_states import CallbackStates
from distnb.keras.callbacks.epoch_dots import EpochDots
from distnb.keras.callbacks.tensorboard import TensorBoard
from distnb.keras.data import SameBatches
from distnb.keras.model_state import share_state, whole_values
from distnb.runtime import contexts, randomness
from distnb.runtime.chief_work.together import raise_together
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.this_process import this_process
from distnb.watching.live import live

__all__ = ["ChiefCallbacks"]

_RARE = ("train_end", "test_begin", "test_end", "predict_begin", "predict_end")
_ENDS = ("train_end", "test_end", "predict_end")
_BATCHES = tuple(f"{kind}_batch_{when}" for kind in ("train", "test", "predict") for when in ("begin", "end"))
# Keras's callbacks that save or log at epochs, or at batches if this attribute is set so.
_FREQUENCIES = {
    keras.callbacks.ModelCheckpoint: "save_freq",
    keras.callbacks.BackupAndRestore: "save_freq",
    keras.callbacks.TensorBoard: "update_freq",
}
# The calls for epochs and whole loops in which Keras's own callbacks use the model's weights. Others may in any call.
_USES_WEIGHTS: dict[type, set[str]] = {
    keras.callbacks.ModelCheckpoint: {"epoch_end"},
    keras.callbacks.BackupAndRestore: {"train_begin", "epoch_end"},
    keras.callbacks.CSVLogger: set(),
    keras.callbacks.LearningRateScheduler: set(),
    keras.callbacks.ReduceLROnPlateau: set(),
    keras.callbacks.TerminateOnNaN: set(),
    EpochDots: set(),
}
_LIVE_S = 0.1  # reading a number of the last step waits for that step


class ChiefCallbacks(keras.callbacks.Callback):  # type: ignore[misc]
    """Representative of the user's callbacks on every replica.

    The callbacks run once, on replica 0, as Keras calls them. All replicas receive their changes when the call has
    ended: of the model (see `callback_changes`) and the end of training, and after calls for epochs and the whole
    training also the first epoch and logs. If a callback draws random numbers, all replicas draw them. If a callback
    raises, all replicas raise its error when the call has ended, and no further callback is called.

    Args:
        strategy: The strategy of the model.
        model: The model.
        callbacks, verbose: Arguments of Keras's loop.

    Attributes:
        acting: True while the user's callbacks run. Their calls on the model then concern this replica alone.
        batches: The comparison of the batches that the replicas read in the current pass over data.
    """

    def __init__(self, strategy: Any, model: Any, callbacks: Any, verbose: Any) -> None:
        super().__init__()
        self.acting = self._is_whole = False
        process = this_process.replica
        assert process is not None
        self._group, self._is_chief = process.group, process.rank == 0
        self._registration = process.runtime_of(strategy).registration
        given = keras.tree.flatten(callbacks) if callbacks else []
        self._given = given
        self._own = given if self._is_chief else []
        self._any = bool(given)
        self._verbose = verbose
        self._training = False
        for each in given:
            each.set_model(model)
        self._states = CallbackStates(model, given, self._group)
        self._resuming = Resuming(model, given)
        self.batches = SameBatches(strategy, lambda: self._group)
        self._shared = {name for name in _BATCHES for each in given if _acts(each, name)}
        self._changing = {name for name in _BATCHES for each in given if _acts(each, name) and not _only_saves(each)}
        self._error: BaseException | None = None
        self._next_live = 0.0
        self._reading = Progress(epoch=0)

    def check_computes(self, method: str) -> None:
        """Raise ContextError if a callback calls a method that computes, and the model cannot compute here."""
        if self._is_whole and self._group.device.type != "cpu":
            raise ContextError(
                f"A callback called model.{method}. The model's weights are sharded over the replicas' devices, and "
                "callbacks get a whole copy in host memory, where the model does not compute. Pass validation_data to "
                f"model.fit, or call model.{method} after it."
            )

    def set_params(self, params: Any) -> None:
        if params:
            params["verbose"] = self._verbose  # only the chief shows progress, but all replicas have its settings
        super().set_params(params)
        for each in self._given:
            each.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        self._call_and_share("train_begin", logs)
        self._resuming.begin_training(self._group)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._call_and_share("epoch_begin", epoch, logs)
        self._resuming.begin_epoch(epoch)
        params = self.params or {}
        self._reading = Progress(epoch=epoch, batches=params.get("steps"), epochs=params.get("epochs"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.batches.check_end()
        self._plot(logs)
        self._resuming.end_epoch(epoch)
        self._call_and_share("epoch_end", epoch, logs)

    def _call(self, name: str, *args: Any) -> None:
        """Call the chief's callbacks. Keep an error until the replicas meet: `_raise_together`."""
        if self._error is not None:
            return
        self.acting = True
        before = contexts.execution()
        try:
            with contexts.executing(contexts.Execution(before and before.strategy, "single")):
                for each in self._own:
                    getattr(each, f"on_{name}")(*args)
        except CollectiveError:
            raise  # the other replicas have the same error, or do not wait for this one
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a callback raises
            self._error = error
        finally:
            self.acting = False

    def _call_for_changes(self, name: str, *args: Any) -> Changes:
        """Call the chief's callbacks, and return their changes of the model."""
        if not self._is_chief:
            return Changes()
        before = ModelBefore(self.model, self._registration)
        self._call(name, *args)
        try:
            with contexts.executing(contexts.Execution(None, "single")):
                return before.changes()
        except ContextError as error:
            self._error = self._error or error
            return Changes()

    def _raise_together(self, failed: bool) -> None:
        """Raise the chief's error on all replicas, if it has one."""
        if not failed:
            return
        error, self._error = self._error, None
        raise_together(error, "A callback of model.fit, evaluate or predict raised this on replica 0.")

    def _plot(self, logs: Mapping[str, Any] | None) -> None:
        """Plot the numbers of the progress bar as curves."""
        if self._is_chief and logs and this_process.live_sink is not None:
            live(**{name: float(value) for name, value in logs.items() if np.ndim(value) == 0})

    # Calls for batches -----------------------------------------------------------------------------------------------

    def reads_logs(self, kind: str) -> bool:
        """Return whether this replica reads the logs of the batch that begins now ("train", "test" or "predict")."""
        if not self._is_chief:
            return False
        is_drawn = this_process.live_sink is not None and kind == "train" and time.monotonic() >= self._next_live
        return is_drawn or self._verbose != 0 or f"{kind}_batch_end" in self._shared

    @property
    def skips(self) -> bool:
        """True if the current batch was trained on before the training was killed, and must be skipped."""
        return self._resuming.to_skip > 0

    def _batch(self, name: str, batch: int, logs: Any) -> None:
        skips = self.skips
        if name.startswith("train_batch"):
            self._reading.steps = batch  # an execution may consist of several batches
            self._reading.count_batch()
        if name == "train_batch_end":
            self._resuming.end_batch(batch)
        if skips:
            return
        if name == "train_batch_end" and logs and time.monotonic() >= self._next_live:
            self._next_live = time.monotonic() + _LIVE_S
            self._plot(logs)
        if name not in self._shared:
            self._call(name, batch, logs)
            return
        before = randomness.captured() if self._is_chief else b""
        if name in self._changing:
            changes = self._call_for_changes(name, batch, logs)
        else:
            changes = Changes()
            self._call(name, batch, logs)
        self._share_batch_changes(changes, drawn=self._is_chief and randomness.captured() != before)

    def _share_batch_changes(self, changes: Changes, *, drawn: bool) -> None:
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        rate = float(optimizer.learning_rate) if optimizer is not None else 0.0
        failed = self._error is not None
        facts = torch.tensor([model.stop_training, rate, drawn, failed, bool(changes)], dtype=torch.float64)
        self._group.broadcast(facts)
        if facts[2]:
            randomness.share(self._group)
        model.stop_training = bool(facts[0])
        if optimizer is not None and float(facts[1]) != rate:
            optimizer.learning_rate = float(facts[1])
        if facts[4]:
            changes = broadcast_tree(self._group, changes, 0)
            if not self._is_chief:
                make_changes(model, self._registration, changes)
        self._raise_together(bool(facts[3]))

    # Calls for epochs, and for the start and end of loops -----------------------------------------------------------

    def _call_and_share(self, name: str, *args: Any) -> None:
        if not self._any:
            return
        uses_weights = any(_uses_weights(each, name) for each in self._given)
        with whole_values(self.model) if uses_weights else nullcontext(False) as is_whole:
            self._is_whole = is_whole
            changes = self._call_for_changes(name, *args)
        self._is_whole = False
        if is_whole:
            whole = {key: value for key, value in changes.tensors.items() if key[0] != MIRRORED}
            share_state(self._group, self.model, whole if self._is_chief else None)
            changes.tensors = {key: value for key, value in changes.tensors.items() if key not in whole}
        failed = self._share_changes(changes, args[-1])
        randomness.share(self._group)
        self._raise_together(failed)
        self._training = (self._training or name == "train_begin") and name != "train_end"
        if name in _ENDS and not self._training:  # not after each validation
            self._states.share()

    def _share_changes(self, changes: Changes, logs: dict[str, Any] | None) -> bool:
        """Share the changes that the chief's callbacks made. Return whether one of them failed."""
        model, sent = self.model, None
        failed: bool
        if self._is_chief:
            sent = (
                changes,
                bool(model.stop_training),
                keras_internals.initial_epoch(model),
                logs,
                self._error is not None,
            )
        changes, model.stop_training, epoch, new_logs, failed = broadcast_tree(self._group, sent, 0)
        if self._is_chief:
            return failed
        if logs is not None:
            logs.clear()
            logs.update(new_logs)
        keras_internals.set_initial_epoch(model, epoch)
        make_changes(model, self._registration, changes)
        return failed


def _acts(callback: Any, name: str) -> bool:
    """Return whether a callback reacts to batches."""
    for cls, frequency in _FREQUENCIES.items():
        if isinstance(callback, cls):
            return bool(getattr(callback, frequency) != "epoch")
    return _overrides(callback, f"on_{name}") or _overrides(callback, f"on_{name.removeprefix('train_')}")


def _only_saves(callback: Any) -> bool:
    """Return whether a callback is known to leave the model as it is in calls for batches."""
    return type(callback) in (*_FREQUENCIES, TensorBoard, EpochDots)


def _uses_weights(callback: Any, name: str) -> bool:
    """Return whether a callback may use the model's weights in a call for an epoch or a whole loop."""
    if type(callback) is keras.callbacks.EarlyStopping and not callback.restore_best_weights:
        return False
    known = _USES_WEIGHTS.get(type(callback))
    return name in known if known is not None else _overrides(callback, f"on_{name}")


def _overrides(callback: Any, hook: str) -> bool:
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


def _rare(name: str) -> Callable[..., None]:
    def call(self: ChiefCallbacks, logs: Any = None) -> None:
        self.batches.check_end()  # of the training, when a validation starts within it
        self._call_and_share(name, logs)

    return call


def _batch(name: str) -> Callable[..., None]:
    def call(self: ChiefCallbacks, batch: int, logs: Any = None) -> None:
        self._batch(name, batch, logs)

    return call


for _name in _RARE:
    setattr(ChiefCallbacks, f"on_{_name}", _rare(_name))
for _name in _BATCHES:
    setattr(ChiefCallbacks, f"on_{_name}", _batch(_name))
