"""Seed 002, "custom training loops" with Keras, all in the scope: models without Input, built by the first `run`.

The documents' subclassed model, a Sequential, and layers by themselves: weights exist when the first batch is known.
"""

import keras
import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: not Keras's

x = torch.arange(28.0).reshape(7, 4) / 28
y = x.sum(dim=1, keepdim=True)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = [keras.layers.Dense(5, activation="tanh")]
        self.out = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.out(self.hidden[0](inputs))


class MadeInBuild(keras.layers.Layer):
    def build(self, shape):
        self.inner = keras.layers.Dense(5, activation="tanh")
        self.inner.build(shape)
        self.scale = self.add_weight(shape=(5,), initializer="ones", name="scale")

    def call(self, inputs):
        return self.inner(inputs) * self.scale


def by_itself():
    layers = MadeInBuild(), keras.layers.Dense(1)
    return (lambda inputs: layers[1](layers[0](inputs))), lambda: [w for each in layers for w in each.trainable_weights]


def whole(model):
    return model, lambda: model.trainable_weights


def train(model, weights, optimizer, dataset):
    def train_step(batch):
        per_example = (model(batch[0]) - batch[1]).square().sum(dim=1)
        loss = distnb.nn.compute_average_loss(per_example)
        for weight in weights():
            weight.value.grad = None
        loss.backward()
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights()], weights())
        return loss.detach()

    for _ in range(2):
        for batch in dataset:
            yield strategy.reduce("sum", strategy.run(train_step, args=(batch,)), axis=None).item()


result = {}
with strategy.scope():
    keras.utils.set_random_seed(0)
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(x, y), batch_size=3))  # 3, 3 and 1
    makers = {
        "sequential": lambda: whole(
            keras.Sequential(
                [keras.layers.Dense(5, activation="tanh"), keras.layers.Dropout(0.0), keras.layers.Dense(1)]
            )
        ),
        "subclassed": lambda: whole(Subclassed()),
        "by itself": by_itself,
    }
    for name, make in makers.items():
        model, weights = make()
        losses = [round(loss, 3) for loss in train(model, weights, keras.optimizers.SGD(0.05, momentum=0.5), dataset)]
        strategy.assert_in_sync([weight.value for weight in weights()])
        result[name] = [losses, [round(float(weight.value.detach().sum()), 3) for weight in weights()]]
    later = keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.5)

# The scope has ended when these weights are made: they are the model's, and so the strategy's.
later.build((None, 4))
result["built outside"] = [round(loss, 3) for loss in train(*whole(later), optimizer, dataset)]
strategy.assert_in_sync(later)
