"""Seed 002: a compiled model on digits with validation; then training that goes on from the newest file of the chief's.

The scope stands in a function, the model is made or loaded in it, and ModelCheckpoint saves each epoch.
"""

from pathlib import Path

import keras
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import distnb

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: not Keras's
images, labels = load_digits(return_X_y=True)
images, labels = torch.from_numpy(images) / 16, torch.from_numpy(labels)


def part(first, last):
    return DataLoader(TensorDataset(images[first:last], labels[first:last]), batch_size=32)


train, validation, test = part(0, 300), part(300, 400), part(400, 500)


def compiled():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(32, activation="relu", dtype="float64")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(10, dtype="float64")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")])
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
result = {"through": through, "tested": tested, "again": again}
