"""Keras's BackupAndRestore on several replicas: a killed training resumes with the very next batch.

Keras's own callback starts the interrupted epoch again, with weights from the middle of it and other shuffles, and a
kill during a save can leave half a file. Here the file of weights also holds the position in the training, and replaces
the old file atomically. Keras can still read it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import keras
import torch

from distnb.checkpoint import trees
from distnb.collectives.group.interface import Group
from distnb.errors import CheckpointError
from distnb.input import draws
from distnb.runtime.randomness import streams
from distnb.runtime.reduction.gathering import broadcast_tree

__all__ = ["Resuming"]

_logger = logging.getLogger("distnb.keras")

_POSITION = "distnb_place"
_METADATA = "training_metadata.json"


@dataclass(frozen=True)
class TrainingPosition:
    """The position of a training when it was saved.

    Attributes:
        epoch: The epoch, from 0.
        batches: The number of batches of this epoch that were trained on.
        began: The random states at the start of the epoch's data.
        now: The random states at the position.
        states: The values of the model's variables other than weights: the metrics' variables, and seeds.
    """

    epoch: int
    batches: int
    began: Mapping[str, Any]
    now: Mapping[str, Any]
    states: list[Any]

    def restore(self, model: Any) -> None:
        """Restore the model's variables and the random streams. Every replica does so."""
        variables = _non_weights(model)
        if len(variables) != len(self.states):
            raise CheckpointError(
                f"The backup has {len(self.states)} states of metrics and seeds, but the model has {len(variables)}. "
                "The model was compiled with other metrics when it was saved."
            )
        for variable, value in zip(variables, self.states, strict=True):
            variable.assign(torch.tensor(value, dtype=variable.value.dtype))
        draws.restore(streams.shared, self.now)
        _logger.info("training resumes in epoch %d after %d batches", self.epoch + 1, self.batches)


class Resuming:
    """The position of a training with BackupAndRestore. It skips the batches that were done before the training was
    killed.

    Every replica has one, and reports the training's events to it. Without such a callback it does nothing.

    Attributes:
        to_skip: The number of batches of this epoch to skip.
    """

    def __init__(self, model: Any, callbacks: Iterable[Any]) -> None:
        self.to_skip = 0
        self._model = model
        self._from: TrainingPosition | None = None
        self._backup = _Backup(model)
        backups = [each for each in callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
        self._is_on = bool(backups)
        for each in backups:
            each.set_model(self._backup)

    def begin_training(self, group: Group) -> None:
        """Record the start of a training, after replica 0's callbacks have received it and may have loaded a backup."""
        if self._is_on:
            self._from = broadcast_tree(group, self._backup.found, 0)
            if self._from is not None and not self._from.batches:
                self._restore(self._from)

    def begin_epoch(self, epoch: int) -> None:
        """Record the start of an epoch, before its data is read."""
        if self._from is not None:
            draws.restore(streams.shared, self._from.began)
            self.to_skip = self._from.batches
        if self._is_on:
            self._backup.epoch, self._backup.batches, self._backup.began = epoch, 0, draws.capture(streams.shared)

    def end_batch(self, batch: int) -> None:
        """Record that a batch, numbered from 0, is done or skipped."""
        self._backup.batches = batch + 1
        if self._from is not None:
            self.to_skip = max(self._from.batches - batch - 1, 0)
            if not self.to_skip:
                self._restore(self._from)

    def end_epoch(self, epoch: int) -> None:
        """Record the end of an epoch.

        Raises:
            CheckpointError: The data ended before the position of the backup.
        """
        if self.to_skip:
            raise CheckpointError(
                f"The backup was made in epoch {epoch + 1}, {self.to_skip} batches after the end of the current data. "
                "Continue with the same data and batch size, or delete the backup."
            )
        self._backup.epoch, self._backup.batches = epoch + 1, 0

    def _restore(self, position: TrainingPosition) -> None:
        position.restore(self._model)
        self._from = None


class _Backup:
    """A proxy of the model for BackupAndRestore callbacks, which adds the position of the training.

    Attributes:
        epoch, batches, began: The current position of the training.
        found: The position in the file that was loaded; None if none was.
    """

    _OWN = frozenset({"_model", "epoch", "batches", "began", "found"})

    def __init__(self, model: Any) -> None:
        self._model = model
        self.epoch = self.batches = 0
        self.began: Mapping[str, Any] = {}
        self.found: TrainingPosition | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in self._OWN else self._model, name, value)

    def save_weights(self, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Save as Keras does, with the position. The file is replaced atomically."""
        path = Path(filepath)
        unfinished = path.with_name(f"unfinished.{path.name}")
        self._model.save_weights(unfinished, overwrite=True)
        states = [each.value.tolist() for each in _non_weights(self._model)]
        position = TrainingPosition(
            epoch=self.epoch, batches=self.batches, began=self.began, now=draws.capture(streams.shared), states=states
        )
        with h5py.File(unfinished, "a") as file:
            file.create_dataset(_POSITION, data=json.dumps(trees.encode(vars(position))[0]))
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.replace(path)

    def load_weights(self, filepath: str | os.PathLike[str], **options: Any) -> None:
        """Load as Keras does, and keep the position, if the file has one."""
        path = Path(filepath)
        self._model.load_weights(path, **options)
        with h5py.File(path, "r") as file:
            saved = file[_POSITION][()].decode() if _POSITION in file else None
        if saved is None:
            return
        self.found = TrainingPosition(**trees.decode(json.loads(saved), {}))
        # Keras reads the epoch from this file, which may be incomplete or missing after a kill.
        metadata = path.with_name(_METADATA)
        metadata.write_text(json.dumps({"epoch": self.found.epoch, "batch": self.found.batches}))


def _non_weights(model: Any) -> list[Any]:
    """Return the variables of a model that `save_weights` omits, in order."""
    weights = {id(each) for each in model.weights}
    found = {id(each): each for each in [*model.variables, *model.metrics_variables] if id(each) not in weights}
    return list(found.values())
