"""Seed 000, training with Model.fit: one dense layer, on batches of a dataset and on arrays; then evaluate and predict."""

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: not Keras's

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, dtype="float64")])
model.compile(loss="mse", optimizer="sgd")

ones = torch.ones(100, 1, dtype=torch.float64)
batches = DataLoader(TensorDataset(ones, ones), batch_size=10)
of_dataset = model.fit(batches, epochs=2, verbose=0).history["loss"]
evaluated = model.evaluate(batches, verbose=0)
of_arrays = model.fit(np.ones((100, 1)), np.ones((100, 1)), epochs=2, batch_size=10, verbose=0).history["loss"]
assert of_arrays[-1] < of_arrays[0] < of_dataset[-1] < of_dataset[0]
result = {
    "dataset": of_dataset,
    "evaluated": evaluated,
    "arrays": of_arrays,
    "predicted": model.predict(np.arange(7.0)[:, None], verbose=0).ravel().tolist(),
}
