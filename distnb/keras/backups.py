"""Keras's BackupAndRestore on several replicas: a training that was killed goes on with the very next batch.

Keras's own begins the interrupted epoch anew, with weights from its midst and other shuffles, and a kill while it saves
can leave half a file. Here its file of weights holds the place in the training, too, and takes the old one's place in
one move; Keras can read it as ever.
"""

from __future__ import annotations

import json
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

_PLACE = "distnb_place"
_METADATA = "training_metadata.json"


@dataclass(frozen=True)
class TrainingPosition:
    """Where a training was when it was saved.

    Attributes:
        epoch: Numbered from 0.
        batches: Of this epoch, those that it had trained on.
        began: The random states with which the epoch's data began.
        now: The random states.
        states: The model's variables that are no weights: of metrics, and seeds.
    """

    epoch: int
    batches: int
    began: Mapping[str, Any]
    now: Mapping[str, Any]
    states: list[Any]

    def take_up(self, model: Any) -> None:
        """Give the model and the random streams what they had. Every replica does so."""
        variables = _no_weights(model)
        if len(variables) != len(self.states):
            raise CheckpointError(
                f"The backup has {len(self.states)} states of metrics and seeds, and the model has {len(variables)}. "
                "It is of a model that was compiled with other metrics."
            )
        for variable, value in zip(variables, self.states, strict=True):
            variable.assign(torch.tensor(value, dtype=variable.value.dtype))
        draws.restore(streams.shared, self.now)


class Resuming:
    """Where a training with BackupAndRestore is, and passing over what it had done before it was killed.

    All replicas have one, and tell it what happens. Without such a callback it does nothing.

    Attributes:
        to_skip: So many batches of this epoch are to be passed over.
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
        """The callbacks of replica 0 were told that a training begins, and may have loaded a backup."""
        if self._is_on:
            self._from = broadcast_tree(group, self._backup.found, 0)
            if self._from is not None and not self._from.batches:
                self._take_up(self._from)

    def begin_epoch(self, epoch: int) -> None:
        """Data of an epoch are about to be read."""
        if self._from is not None:
            draws.restore(streams.shared, self._from.began)
            self.to_skip = self._from.batches
        if self._is_on:
            self._backup.epoch, self._backup.batches, self._backup.began = epoch, 0, draws.capture(streams.shared)

    def end_batch(self, batch: int) -> None:
        """A batch, numbered from 0, is done or passed over."""
        self._backup.batches = batch + 1
        if self._from is not None:
            self.to_skip = max(self._from.batches - batch - 1, 0)
            if not self.to_skip:
                self._take_up(self._from)

    def end_epoch(self, epoch: int) -> None:
        """An epoch is done.

        Raises:
            CheckpointError: The backup is of a batch that it does not have.
        """
        if self.to_skip:
            raise CheckpointError(
                f"The backup was made in epoch {epoch + 1}, {self.to_skip} batches after the end of the data that "
                "there are now. Go on with the same data and batch size, or delete the backup."
            )
        self._backup.epoch, self._backup.batches = epoch + 1, 0

    def _take_up(self, place: TrainingPosition) -> None:
        place.take_up(self._model)
        self._from = None


class _Backup:
    """A model as BackupAndRestore callbacks see it: in all else it is the model.

    Attributes:
        epoch, batches, began: Of the place where the training is.
        found: The place that a file told which was loaded; None: none was.
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
        """Save as Keras does, with the place; the file is there whole, or as it was."""
        path = Path(filepath)
        unfinished = path.with_name(f"unfinished.{path.name}")
        self._model.save_weights(unfinished, overwrite=True)
        states = [each.value.tolist() for each in _no_weights(self._model)]
        place = TrainingPosition(
            epoch=self.epoch, batches=self.batches, began=self.began, now=draws.capture(streams.shared), states=states
        )
        with h5py.File(unfinished, "a") as file:
            file.create_dataset(_PLACE, data=json.dumps(trees.encode(vars(place))[0]))
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.replace(path)

    def load_weights(self, filepath: str | os.PathLike[str], **options: Any) -> None:
        """Load as Keras does, and note the place, if the file has one."""
        path = Path(filepath)
        self._model.load_weights(path, **options)
        with h5py.File(path, "r") as file:
            told = file[_PLACE][()].decode() if _PLACE in file else None
        if told is None:
            return
        self.found = TrainingPosition(**trees.decode(json.loads(told), {}))
        # Keras reads the epoch from there, which a kill may have left half written, or not written yet.
        metadata = path.with_name(_METADATA)
        metadata.write_text(json.dumps({"epoch": self.found.epoch, "batch": self.found.batches}))


def _no_weights(model: Any) -> list[Any]:
    """In order: the variables of a model that `save_weights` leaves out."""
    weights = {id(each) for each in model.weights}
    found = {id(each): each for each in [*model.variables, *model.metrics_variables] if id(each) not in weights}
    return list(found.values())
