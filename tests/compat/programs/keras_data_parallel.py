"""A program in the style of Keras 3.16's own data parallelism: a distribution, a model, fit on each rank's own rows."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")
keras.distribution.initialize()
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
keras.utils.set_random_seed(5)

rows = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
dataset = TensorDataset(torch.from_numpy(rows), torch.from_numpy((rows.sum(axis=1) > 0).astype("int64")))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False))

model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
history = model.fit(loader, epochs=2, verbose=0).history
result = history["loss"], history["accuracy"], [float(each.sum()) for each in model.get_weights()]
