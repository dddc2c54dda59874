"""Keras in a notebook: in distributed and ordinary cells, with one progress bar, and with failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

DATA = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, torch, distnb
rng = np.random.default_rng(0)
X = rng.normal(size=(50, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
"""
TRAINING = """
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(X, Y, batch_size=16, epochs=3, verbose=2, validation_data=(X[:9], Y[:9]))
losses = history.history["loss"]
predicted = model.predict(X[:5], verbose=0)
"""


@pytest.fixture(scope="module")
def cells(notebook: Notebook) -> Notebook:
    notebook.run(DATA, timeout_s=60)
    alone = notebook.run("%%distribute default" + TRAINING, timeout_s=60)
    assert alone.stdout.count("Epoch 3/3") == 1
    notebook.run("expected, shown = losses, predicted\nassert len(expected) == 3")
    return notebook


def test_the_same_text_trains_in_a_distributed_cell(cells: Notebook) -> None:
    ran = cells.run("%%distribute mirrored" + TRAINING, timeout_s=90)
    assert ran.stdout.count("Epoch 3/3") == 1, ran.stdout
    assert cells.value("np.allclose(losses, expected, atol=1e-5)") is True
    assert cells.value("np.allclose(predicted, shown, atol=1e-5)") is True


def test_ordinary_cells_train_models_on_the_replicas(cells: Notebook) -> None:
    cells.run("strategy = distnb.MirroredStrategy()" + TRAINING, timeout_s=90)
    assert cells.value("np.allclose([float(each) for each in losses], expected, atol=1e-5)") is True
    assert cells.value("np.allclose(predicted, shown, atol=1e-5)") is True
    assert cells.value("round(float(model.evaluate(X, Y, verbose=0, return_dict=True)['loss']), 6) > 0") is True
    cells.run("stop = keras.callbacks.EarlyStopping('loss', min_delta=100)")
    ran = cells.run("again = model.fit(X, Y, epochs=5, verbose=0, callbacks=[stop])\nprint(len(again.history['loss']))")
    assert ran.stdout == "2\n", "and no notice that the replicas changed the callback differently"
    assert cells.value("abs(float(stop.best) - float(again.history['loss'][0])) < 1e-9") is True, (
        "the notebook's own model was trained"
    )


GENERATED = """
def generate():
    while True:
        yield from ((X[first : first + 16], Y[first : first + 16]) for first in range(0, 50, 16))
def own(context):
    size = context.get_per_replica_batch_size(16)
    return [(X[first : first + size], Y[first : first + size]) for first in range(0, 50, size)]
def fresh():
    model.set_weights(start)
    return model
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
start = model.get_weights()
pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
loader = torch.utils.data.DataLoader(pairs, batch_size=16)
"""


def test_ordinary_cells_fit_models_from_functions_and_strategies(cells: Notebook) -> None:
    """Check that the error for a generator says what to pass instead."""
    cells.run("strategy = distnb.MirroredStrategy()" + GENERATED, timeout_s=60)
    data = ["loader", "distnb.keras.DatasetCreator(own)", "distnb.keras.DatasetCreator(generate)"]
    data += ["strategy.distribute_dataset(loader)", "strategy.distribute_datasets_from_function(own)"]
    more = "epochs=1, steps_per_epoch=4, verbose=0"
    losses = [cells.value(f"float(fresh().fit({each}, {more}).history['loss'][0])") for each in data]
    assert losses == pytest.approx([losses[0]] * 5, abs=1e-5)
    ran = cells.try_run(f"model.fit(generate(), {more})", timeout_s=60)
    assert ran.error_name == "CannotTravelError"
    assert "distnb.keras.DatasetCreator(make_batches)" in ran.error_text
    for call in (
        "keras.models.clone_model(model)",
        "keras.Sequential([model])",
        "keras.Model(model.inputs, model.outputs)",
    ):
        ran = cells.try_run(call)
        assert ran.error_name == "ContextError", call
        assert "in the body of `with strategy.scope():`" in ran.error_text
    cells.run(f"with strategy.scope():\n    again = {call}\nassert again.count_params() == model.count_params() == 14")
    cells.run(f"def build():\n    with strategy.scope():\n        built = {call}\n    return built\nbuilt = build()")
    ran = cells.run("%%distribute default\nalone = build()", timeout_s=60)
    assert "get_ipython" not in ran.stdout + ran.stderr, "what the block's function asks of the shell is not the cell's"


SETTINGS = """
def settings():
    layer = keras.layers.Dense(1)
    config = keras.config
    return [layer.compute_dtype, layer.variable_dtype, config.floatx(), config.image_data_format(), config.epsilon()]
"""


def test_settings_and_random_numbers_of_keras_travel(cells: Notebook) -> None:
    """Check that replicas have the notebook's settings, and that a cell's settings come back."""
    cells.run(SETTINGS)
    before = cells.value("settings()")
    cells.run(
        "keras.mixed_precision.set_global_policy('mixed_bfloat16')\n"
        "keras.config.set_image_data_format('channels_first')\nkeras.config.set_epsilon(1e-3)"
    )
    here = cells.value("settings()")
    assert here[:2] == ["bfloat16", "float32"] != before[:2]
    cells.run("keras.utils.set_random_seed(3)\nfirst = [keras.random.normal((2,)).tolist() for _ in range(3)]")
    cells.run("keras.utils.set_random_seed(3)\nagain = [keras.random.normal((2,)).tolist()]")
    for strategy in ("mirrored", "default"):
        cells.run(f"%%distribute {strategy}\nthere = settings()\nagain.append(keras.random.normal((2,)).tolist())")
        assert cells.value("there") == here, strategy
    assert cells.value("again == first") is True
    cells.run("strategy = distnb.MirroredStrategy()")
    assert cells.value("strategy.run(settings)") == here
    cells.run(
        "%%distribute mirrored\nkeras.config.set_dtype_policy('float32')\n"
        "keras.config.set_image_data_format('channels_last')\nkeras.config.set_epsilon(1e-7)"
    )
    assert cells.value("settings()") == before


GRAPHS = """
class Keeps(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.first, self.ends = self.model.layers[0], [self.model.inputs[0], self.model.outputs]

    def on_epoch_end(self, epoch, logs=None):
        self.loss = logs["loss"]
keeps, inputs = Keeps(), [keras.Input((6,))]
scaled = keras.layers.Rescaling(0.5)(inputs[0])
log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.update(logs))
kept, made = {}, []
"""


def test_what_nobody_assigned_causes_no_notice(cells: Notebook) -> None:
    """Build on the notebook's inputs, and let callbacks refer to parts of the model."""
    cells.run(GRAPHS)
    ran = cells.run(
        "%%distribute mirrored\nwith strategy.scope():\n"
        "    made.append(keras.layers.Dense(2)(inputs[0]))\n    model = keras.Model(inputs, made)\n"
        "    model.compile('sgd', keras.losses.SparseCategoricalCrossentropy(from_logits=True))\n"
        "model.fit(X, Y, verbose=0, callbacks=[keeps, log])\n"
        "assert keeps.first is model.layers[0] and keeps.ends[1][0] is model.outputs[0] is made[0]",
        timeout_s=60,
    )
    assert not ran.stderr
    assert cells.value("[type(keeps).__name__, type(inputs[0]).__name__]") == ["Keeps", "KerasTensor"]
    assert cells.value("keeps.loss == kept['loss'] > 0") is True
    ran = cells.run(
        "%%distribute mirrored\nwith strategy.scope():\n    again = keras.Model(model.inputs, made)\n"
        "assert again.layers == model.layers\n"
        "assert again.predict(X, verbose=0).shape == (50, 2)",
        timeout_s=60,
    )
    assert not ran.stderr
    ran = cells.try_run("%%distribute mirrored\nwith strategy.scope():\n    keras.Model(inputs, scaled)")
    assert ran.error_name == "CannotTravelError"
    assert "make the layers and their outputs within one `with strategy.scope():`" in ran.error_text


def test_metrics_in_cells_count_every_replica(cells: Notebook) -> None:
    """Count in both kinds of cells with a scope's metric, and send one of the notebook's with its counts."""
    cells.run(
        "%%distribute mirrored\nwith strategy.scope():\n    mean = keras.metrics.Mean()\n"
        "def step(part):\n    mean.update_state(part)\n    return float(mean.result())\n"
        "for part in strategy.distribute_dataset(torch.arange(5.0), batch_size=3):\n"
        "    in_run = strategy.run(step, args=(part,))\n"
        "assert in_run == float(mean.result()) == 2.0",
        timeout_s=60,
    )
    cells.run(
        "strategy = distnb.MirroredStrategy()\n"
        "for part in strategy.distribute_dataset(torch.arange(5.0) + 5, batch_size=3):\n"
        "    strategy.run(step, args=(part,))"
    )
    assert cells.value("[float(mean.result()), float(mean.total), float(mean.count)]") == [4.5, 45.0, 10.0]
    cells.run("own = keras.metrics.Mean()\nown.update_state([1.0, 3.0])")
    cells.run("%%distribute mirrored\nassert float(own.result()) == 2.0\nown.update_state([8.0])")
    assert cells.value("float(own.result())") == 4.0
    ran = cells.try_run("strategy.run(lambda: own.update_state([1.0]))", timeout_s=60)
    assert ran.error_name == "ContextError"
    assert "was made outside strategy.scope()" in ran.error_text
    cells.run("%%distribute mirrored\nmean.reset_state()\nassert float(mean.result()) == 0.0")


def test_a_notebook_model_pickled_at_different_times_keeps_its_identity(cells: Notebook) -> None:
    cells.run("plain = keras.Sequential([keras.layers.Dense(1)])")
    ran = cells.run(
        "%%distribute mirrored\nimport time\nname = plain.name\ntime.sleep(1.1 * distnb.replica_id())", timeout_s=60
    )
    assert "changed differently" not in ran.stdout + ran.stderr
    assert cells.value("type(plain).__name__ == 'Sequential' and plain.name == name") is True


def test_ordinary_cells_save_and_restore_a_model(cells: Notebook, tmp_path: Path) -> None:
    """Save and restore a model with its optimizer, also one that its first batch builds."""
    cells.run("strategy = distnb.MirroredStrategy()" + TRAINING, timeout_s=90)
    assert cells.value("type(model).__name__") == "RemoteMirrored"
    cells.run(f"path = distnb.Checkpoint(model=model).write({str(tmp_path / 'one')!r})")
    goes_on = "[float(x) for x in model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False).history['loss']]"
    cells.run(f"first = {goes_on}\ndistnb.Checkpoint(model=model).restore(path)\nsecond = {goes_on}")
    assert cells.value("first == second != losses[-2:]") is True
    cells.run(f"%%distribute default\n{TRAINING.replace('epochs=3', 'epochs=1')}", timeout_s=60)
    cells.run(f"distnb.Checkpoint(model=model).restore(path)\nalone = {goes_on}")
    assert cells.value("np.allclose(first, alone, atol=1e-6)") is True


def test_a_failing_callback_ends_the_cell_and_the_next_cell_works(cells: Notebook, tmp_path: Path) -> None:
    cells.run("%%distribute mirrored" + TRAINING, timeout_s=90)
    ran = cells.try_run(
        "%%distribute mirrored\n"
        "class Fails(keras.callbacks.Callback):\n"
        "    def on_epoch_end(self, epoch, logs=None):\n"
        "        raise ValueError('mine')\n"
        "model.fit(X, Y, epochs=2, verbose=0, callbacks=[Fails()])",
        timeout_s=60,
    )
    assert ran.error_name == "ValueError"
    assert ran.error_text == "mine"
    ran = cells.run(
        "%%distribute mirrored\nprint(len(model.fit(X, Y, epochs=2, verbose=0).history['loss']))", timeout_s=60
    )
    assert "[0-1] 2" in ran.stdout


def test_a_step_of_one_replica_alone_is_repaired(cells: Notebook, tmp_path: Path) -> None:
    """Check that replica 0's optimizer state is copied too when the next program begins."""
    cells.run(f"STEPPED = {str(tmp_path / 'stepped')!r}")
    training = TRAINING.replace('"adam"', "keras.optimizers.SGD(0.1, momentum=0.9)").replace("verbose=2", "verbose=0")
    ran = cells.try_run(
        f"%%distribute mirrored{training}"
        "plain = model.optimizer.apply\n"
        "def apply(*args, **kwargs):\n"
        "    if distnb.replica_id() == 0:\n"
        "        plain(*args, **kwargs)\n"
        "        open(STEPPED, 'w').close()\n"
        "    else:\n"
        "        while not os.path.exists(STEPPED):\n"
        "            pass\n"
        "        raise ValueError('no step')\n"
        "model.optimizer.apply = apply\n"
        "model.fit(X, Y, batch_size=16, verbose=0)",
        timeout_s=90,
    )
    assert ran.error_name == "ValueError"
    ran = cells.run(
        "%%distribute mirrored\n"
        "del model.optimizer.apply\n"
        "kept = [float(each.value.sum()) for each in model.optimizer.variables]\n"
        "with strategy.scope():\n    pass\n"
        "again = [float(each.value.sum()) for each in model.optimizer.variables]\n"
        "model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)\n"
        "strategy.assert_in_sync(model)",
        timeout_s=60,
    )
    assert "differ between replicas" not in ran.stderr
    cells.run("strategy = distnb.MirroredStrategy()\nkept, again = map(strategy.local_results, (kept, again))")
    assert cells.value("kept[0] != kept[1]") is True, "replica 1 had not stepped"
    assert cells.value("again[0] == again[-1] == kept[0]") is True


def test_replicas_may_number_their_layers_differently(cells: Notebook) -> None:
    """Use layers named `dense_9` and `dense_10` on one replica and `dense_50` and `dense_51` on the other."""
    cells.run(
        "%%distribute mirrored\nimport keras\nkeras.backend.clear_session()\n"
        "for _ in range(9 if distnb.replica_id() else 50):\n    keras.layers.Dense(1), keras.Variable(0.0)\n"
        "with strategy.scope():\n"
        "    wrapped = keras.layers.TorchModuleWrapper(torch.nn.Linear(5, 5), output_shape=(None, 5))\n"
        "    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), wrapped, keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "names = [each.path for each in model.variables]\n"
        "model.fit(X, Y, batch_size=16, verbose=0)\n"
        "strategy.assert_in_sync(model)\n"
        "with strategy.scope():\n"
        "    late = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])\n"
        "    steps = keras.Variable(0.0, trainable=False, aggregation='sum')\n"
        "strategy.run(lambda: (steps.assign_add(1.0), late(torch.ones(1, 3))))\n"
        "strategy.assert_in_sync(late)\n"
        "assert float(steps) == 2",
        timeout_s=60,
    )
    cells.run("first, second = distnb.MirroredStrategy().local_results(names)")
    assert cells.value("first[0][-15:] != second[0][-15:]") is True, "the counts differ"
    cells.run("kernel, optimizer = model.layers[0].kernel, model.optimizer")
    kinds = cells.value("[isinstance(each, distnb.Mirrored) for each in (kernel, optimizer)]")
    assert kinds == [True, True], "only their names differ"


def test_training_continues_after_an_engine_is_killed(cells: Notebook, tmp_path: Path) -> None:
    """Check that training restored from its backup ends as training without interruption does."""
    cells.run(f"FOLDER = {str(tmp_path)!r}")
    training = TRAINING.replace("verbose=2,", "verbose=0, shuffle=False, callbacks=callbacks,")
    cells.run("%%distribute mirrored\ncallbacks = []" + training, timeout_s=90)
    cells.run("whole = [float(each) for each in losses]")
    backup = "keras.callbacks.BackupAndRestore(os.path.join(FOLDER, 'backup'))"
    ran = cells.try_run(
        "%%distribute mirrored\nimport signal\n"
        "class Dies(keras.callbacks.Callback):\n"
        "    def on_epoch_begin(self, epoch, logs=None):\n"
        "        if epoch == 2:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
        f"callbacks = [{backup}, Dies()]" + training,
        timeout_s=60,
    )
    assert ran.error_name == "EngineDied", ran
    cells.run("%distnb restart --missing", timeout_s=60)
    # The model is there, with its optimizer's state. Other models have equal names on both replicas.
    cells.run(
        "%%distribute mirrored\nmodel.fit(X, Y, epochs=1, verbose=0)\nstrategy.assert_in_sync(model)\n"
        "moments = tuple(float(each.value.double().sum()) for each in model.optimizer.variables)\n"
        "with strategy.scope():\n    linear = torch.nn.Linear(6, 1)\n"
        "strategy.run(lambda: linear(torch.ones(1, 6)).sum().backward())",
        timeout_s=60,
    )
    assert cells.value("isinstance(moments, tuple)") is True, "the same on both replicas"
    ran = cells.run(f"%%distribute mirrored\ncallbacks = [{backup}]" + training, timeout_s=90)
    assert "differ between replicas" not in ran.stderr, "a repaired difference is not reported"
    assert cells.value("len(losses)") == 1, "it resumed with the third epoch"
    assert cells.value("np.allclose(losses, whole[2:], atol=1e-6)") is True


def test_models_on_a_new_engine_still_share_layers(cells: Notebook) -> None:
    """Check that the larger model stays in sync, although Keras's pickles make copies."""
    cells.run("strategy = distnb.MirroredStrategy()" + TRAINING, timeout_s=90)
    cells.run("with strategy.scope():\n    again = keras.Model(model.inputs, model.outputs)")
    killed = "%%distribute mirrored\nimport signal\nif distnb.replica_id():\n    os.kill(os.getpid(), signal.SIGKILL)"
    assert cells.try_run(killed, timeout_s=60).error_name == "EngineDied"
    cells.run("%distnb restart --missing", timeout_s=60)
    for _ in range(2):
        trained = "%%distribute mirrored\nmodel.fit(X, Y, batch_size=16, verbose=0)\nstrategy.assert_in_sync(model)"
        cells.run(f"{trained}\nimport gc\n_ = gc.collect()", timeout_s=60)
        cells.run("again = None")


NESTED = """
def make_loss():
    def loss(true, predicted):
        return keras.ops.mean(keras.ops.square(true - predicted), axis=-1) * factor
    return loss
class Gain(keras.layers.Layer):
    def call(self, inputs):
        return inputs * gain
factor = gain = 1.0
with strategy.scope():
    model = keras.Sequential([Gain(), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", make_loss())
first = float(model.evaluate(X, 0 * X[:, :1], verbose=0))
factor, gain = 3.0, 2.0
second = float(model.evaluate(X, 0 * X[:, :1], verbose=0))
"""


@pytest.mark.parametrize("how", ["%%distribute default\n", "%%distribute mirrored\n", ""])
def test_functions_of_a_model_read_the_current_namespace(cells: Notebook, how: str) -> None:
    if not how:
        cells.run("strategy = distnb.MirroredStrategy()")
    cells.run(how + NESTED, timeout_s=60)
    assert cells.value("round(second / first, 4)") == 12.0
