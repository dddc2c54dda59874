"""Keras models of torch modules under a ShardedStrategy have one process's numbers, on shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keras_nightly import NIGHTLY, needs_nightly
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

# 7 rows, and 2, do not divide among 3 replicas. The last batch has 2 rows, so one replica has an empty slice.
_DEFINITIONS = """
import os
import warnings
os.environ["KERAS_BACKEND"] = "torch"
import numpy as np
import torch
import keras
import distnb
from keras import optimizers
from keras.layers import TorchModuleWrapper as Wrapped

thirds = distnb.ShardedStrategy(["cpu:0", "cpu:1", "cpu:2"], min_size=0)
pair = distnb.ShardedStrategy(["cpu:0", "cpu:1"], min_size=0)
X = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


def linear(inputs, outputs):
    return Wrapped(torch.nn.Linear(inputs, outputs), output_shape=(None, outputs))


def sequential():
    return keras.Sequential([keras.Input((6,)), linear(6, 7), keras.layers.Activation("tanh"), linear(7, 2)])


def functional():
    inputs = keras.Input((6,))
    inner = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7))
    hidden = Wrapped(inner, output_shape=(None, 7))(inputs)
    return keras.Model(inputs, linear(7, 2)(keras.layers.Concatenate()([hidden, hidden[:, :0]])))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7, momentum=0.5)
        self.last = torch.nn.Linear(7, 2)

    def call(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def compiled(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def made(strategy, make=sequential, optimizer=None, seed=0):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        return compiled(make(), optimizer or optimizers.Adam(0.05))


def fit(model, epochs=1, batch_size=16, **options):
    return model.fit(X, Y, batch_size=batch_size, epochs=epochs, verbose=0, **options).history["loss"]


def numbers(model):
    variables = [*model.weights, *model.optimizer.variables]
    return [torch.as_tensor(each.numpy()).double().flatten().tolist() for each in variables]


def difference(one, other):
    pairs = zip(one, other, strict=True)
    return max(float(np.abs(np.subtract(a, b)).max()) if np.size(a) else 0.0 for a, b in pairs)
"""


@pytest.fixture(scope="module", params=["release", pytest.param("nightly", marks=[needs_nightly, pytest.mark.soak])])
def notebook(request: pytest.FixtureRequest) -> Iterator[Notebook]:
    first = [str(NIGHTLY)] if request.param == "nightly" else []
    with Notebook(3, env={"PYTHONPATH": os.pathsep.join([*first, str(Path(__file__).parents[2])])}) as notebook:
        notebook.run(_DEFINITIONS)
        yield notebook


def same(notebook: Notebook, program: str, *, within: float = 1e-5) -> None:
    """Run a program that assigns lists of numbers to `found` on 3 replicas and in the notebook, and compare them."""
    notebook.run(f"%%distribute thirds\n{program}\nshards = found", timeout_s=100)
    notebook.run(f"%%distribute default\n{program}")
    assert notebook.value("difference(shards, found)") < within


def test_numbers_are_those_of_one_process(notebook: Notebook) -> None:
    same(
        notebook,
        """
found = []
for make in (sequential, functional, Subclassed):
    model = made(strategy, make, optimizers.SGD(0.1, momentum=0.9))
    # Each replica normalises over its own rows.
    found += [fit(model, 2)] if make is not Subclassed else [fit(model, 2, batch_size=25)[:0]]
    if make is not Subclassed:
        found += [*numbers(model), model.evaluate(X, Y, batch_size=7, verbose=0), model.predict(X[:11], 4, verbose=0).tolist()]
""",
    )


def test_every_optimizer_has_the_numbers_of_one_process(notebook: Notebook) -> None:
    same(
        notebook,
        """
found = []
for optimizer in (
    optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
    optimizers.Adam(0.05, amsgrad=True, global_clipnorm=0.1),
    optimizers.AdamW(optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), weight_decay=0.1),
    optimizers.RMSprop(0.01, momentum=0.9, centered=True, clipvalue=0.01),
    optimizers.Lion(0.01, loss_scale_factor=8.0),
    optimizers.Nadam(0.05, gradient_accumulation_steps=2),
    optimizers.LossScaleOptimizer(optimizers.Adamax(0.05), dynamic_growth_steps=2),
    optimizers.Ftrl(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
):
    model = made(strategy, sequential, optimizer)
    found += [fit(model), *numbers(model)]
""",
    )


def test_each_replica_has_a_part_of_the_weights_and_slots(notebook: Notebook) -> None:
    notebook.run(
        """%%distribute thirds
with strategy.scope():
    wide = keras.Sequential([keras.Input((300,)), linear(300, 300), linear(300, 300)])
compiled(wide, optimizers.Adam())
wide.fit(np.ones((6, 300), "float32"), np.zeros(6, "int64"), verbose=0)
whole = sum(4 * int(np.prod(each.shape)) for each in wide.weights)
parts = [each.value.to_local().nbytes for each in wide.weights]
slots = [each.value.to_local().nbytes for each in wide.optimizer.variables if each.shape]
shares = (sum(parts) / whole, sum(slots) / whole)
registered = all(each.value is next(p for p in wide.parameters() if p is each.value) for each in wide.weights)
"""
    )
    assert notebook.value("[round(each, 2) for each in shares]") == [0.33, 0.67]
    assert notebook.value("registered")


def test_files_are_those_of_one_process(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"folder = {str(tmp_path)!r}")
    same(
        notebook,
        """
path = f"{folder}/{strategy is thirds}"
model = made(strategy)
fit(model)
model.save_weights(f"{path}.weights.h5")
model.save(f"{path}.keras")
kept = numbers(model)
fit(model)
model.load_weights(f"{path}.weights.h5")
found = [*numbers(model), fit(model)]
other = made(strategy, seed=3)
fit(other)
other.load_weights(f"{path}.weights.h5")
with strategy.scope():
    third = keras.saving.load_model(f"{path}.keras", safe_mode=False)
for each in (other, third):
    found += [[difference(numbers(each), kept)], fit(each), *numbers(each)]
third.set_weights(other.get_weights())
found += third.get_weights()
found = [np.ravel(each).tolist() for each in found]
""",
    )
    notebook.run("loaded = keras.saving.load_model(f'{folder}/True.keras', safe_mode=False)")
    assert notebook.value("difference(numbers(loaded), kept)") < 1e-6
    assert notebook.value("type(loaded.layers[0].module).__name__") == "Linear"
    notebook.run(
        """%%distribute thirds
source, other = made(strategy, Subclassed), made(strategy, Subclassed, seed=3)
for each in (source, other):
    fit(each, batch_size=25)
source.save_weights(f"{folder}/statistics.weights.h5")
other.load_weights(f"{folder}/statistics.weights.h5")
means = [
    strategy.gather(strategy.run(lambda: each.norm.module.running_mean[None]), 0).tolist() for each in (source, other)
]
"""
    )
    assert notebook.value("all(mean == means[0][0] for mean in means[0] + means[1])")
    assert notebook.value("any(means[0][0])")


def test_callbacks_on_the_chief_use_whole_weights(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"folder = {str(tmp_path)!r}")
    same(
        notebook,
        """
class Halve(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["seen"] = float(self.model.evaluate(X, Y, verbose=0)[0] + self.model.predict(X, verbose=0).sum())
        self.model.weights[1].assign(self.model.weights[1] * 0.5)


path = f"{folder}/{strategy is thirds}"
checkpoint = keras.callbacks.ModelCheckpoint(path + "-{epoch}.weights.h5", save_weights_only=True)
model = made(strategy)
history = model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=[checkpoint, Halve()]).history
found = [history["seen"], *numbers(model)]
model.load_weights(path + "-2.weights.h5")
found += numbers(model)
early = keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True)
model = made(strategy, optimizer=optimizers.SGD(3.0))
found += [fit(model, 4, callbacks=[early, keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0)])]
found += numbers(model)
""",
        within=1e-4,
    )
    notebook.run(
        """%%distribute thirds
class Kill(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise ValueError("killed")


backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
whole = fit(made(strategy), 4, shuffle=False)
try:
    fit(made(strategy), 4, shuffle=False, callbacks=[backup, Kill()])
except ValueError as error:
    failed = str(error)
resumed = fit(made(strategy, seed=3), 4, shuffle=False, callbacks=[backup])
"""
    )
    assert notebook.value("failed") == "killed"
    assert notebook.value("difference([resumed], [whole[2:]])") < 1e-5


def test_callbacks_after_batches_cannot_use_weights(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"%%distribute thirds\nmodel = made(strategy)\nfolder = {str(tmp_path)!r}")
    for callback in (
        "ModelCheckpoint(f'{folder}/model.keras', save_freq=2)",
        "LambdaCallback(on_train_batch_end=lambda batch, logs: model.get_weights())",
        "LambdaCallback(on_train_batch_end=lambda batch, logs: model.predict(X, verbose=0))",
        "LambdaCallback(on_train_batch_end=lambda batch, logs: model.set_weights([np.zeros((7, 6))] * 4))",
    ):
        with pytest.raises(AssertionError, match=r"(?s)ContextError: .*A callback on replica 0 uses.* in on_epoch_end"):
            notebook.run(f"%%distribute thirds\nfit(model, callbacks=[keras.callbacks.{callback}])")
    notebook.run("%%distribute thirds\nfit(model)")


def test_checkpoints_are_restored_under_any_strategy(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"paths = [{str(tmp_path)!r} + f'/{{number}}' for number in range(3)]")
    cell = """%%distribute {strategy}
model = made(strategy, Subclassed, seed={seed})
fit(model, batch_size=25)
{restore}
found = [*numbers(model), strategy.run(lambda: model.norm.module.running_mean.tolist())]
"""
    save = "path = distnb.Checkpoint(model=model).save(f'{folder}/{strategy.spec.kind}')\n"
    notebook.run(f"folder = {str(tmp_path)!r}")
    notebook.run(cell.format(strategy="thirds", seed=0, restore=save) + "expected = found")
    files = notebook.value("sorted(os.listdir(path))")
    assert len([each for each in files if each.endswith(".safetensors")]) == 3
    for strategy in ("default", "mirrored", "pair", "thirds"):
        restore = f"distnb.Checkpoint(model=model).restore(path)\n{save}"
        notebook.run(cell.format(strategy=strategy, seed=3, restore=restore))
        assert notebook.value("difference(found[:-1], expected[:-1])") < 1e-6


def test_the_notebook_sees_one_model(notebook: Notebook) -> None:
    notebook.run(
        "%%distribute thirds\nmodel = made(strategy)\nfit(model)\noptimizer, weight = model.optimizer, model.weights[0]\n"
        "expected, predicted = numbers(model), model.predict(X, verbose=0)"
    )
    kinds = "[isinstance(each, distnb.Mirrored) for each in (model, optimizer, weight, weight.value)]"
    assert notebook.value(kinds) == [True] * 4
    assert notebook.value("float(np.abs(weight.numpy().ravel() - expected[0]).max())") == 0
    assert notebook.value("float(np.abs(model.get_weights()[2].ravel() - expected[2]).max())") == 0
    assert notebook.value("float(np.abs(model.predict(X, verbose=0) - predicted).max())") < 1e-6
    assert notebook.value("len(model.evaluate(X, Y, verbose=0))") == 2
    notebook.run("thirds.assert_in_sync((model, optimizer))")
    assert "Shard(0)" in str(notebook.run("distnb.visualize(model)").displays[-1])
    copy = notebook.run(
        """%%distribute default
print(type(model.layers[0].module).__name__, model.weights[0].value is model.layers[0].module.weight)
print(difference(numbers(model), expected) == 0, np.abs(model.predict(X, verbose=0) - predicted).max() < 1e-6)
fit(model)
print(difference(numbers(model), expected) > 0)
"""
    )
    assert "Linear True\nTrue True\nTrue\n" in copy.stdout
    notebook.run("%%distribute thirds\nassert difference(numbers(model), expected) == 0\nfit(model)")


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("made(strategy, lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]))", "TorchModuleWrapper"),
        ("fit(made(strategy, lambda: keras.Sequential([linear(6, 3), keras.layers.Dense(2)])))", "TorchModuleWrapper"),
        ("fit(made(strategy, optimizer=optimizers.Adafactor(0.1)))", "Adafactor cannot update the parameters"),
        ("shared = torch.nn.Linear(6, 6)\n    made(strategy, lambda: keras.Sequential([Wrapped(torch.nn.Sequential(shared)), Wrapped(shared)]))", "share a parameter"),
        ("with strategy.scope():\n        kept = torch.nn.Sequential(linear(6, 2))", "not Keras layers into a torch module"),
    ],
    ids=["built", "built by fit", "optimizer", "shared", "within torch"],
)  # fmt: skip
def test_what_cannot_be_sharded_is_refused_on_all_replicas(notebook: Notebook, program: str, error: str) -> None:
    notebook.run(
        f"%%distribute thirds\nerrors = None\ntry:\n    {program}\n"
        "except distnb.errors.DistnbError as error:\n    errors = str(error)"
    )
    assert error in notebook.value("errors")
    notebook.run("%%distribute thirds\nfit(made(strategy))")
