"""Keras: `fit` and its relatives, steps of the user's own, optimizers, metrics, callbacks, and statistics.

Keras multiplies matrices in float32 on torch, so numbers are equal up to its rounding.
"""

from __future__ import annotations

import os
import shutil

import numpy as np
import torch

import distnb
from tests.conformance.prelude import pause, rows, strategy, train
from tests.conformance.program import Refusal, program

os.environ["KERAS_BACKEND"] = "torch"  # the programs import Keras, which is not loaded to collect tests

# Each strategy with one replica is next to one with several, because `make test` samples two neighbours.
_REPLICATED = ("default", "mirrored", "one_device", "multi_worker", "central_storage")
_KERAS = {"under": _REPLICATED, "samples": 2, "dtype": "float32", "tolerance": 2e-5}


def data(count=22, width=4, seed=1):
    """Return inputs, and targets of three classes."""
    x = rows(count, width, seed).numpy()
    return x, (np.arange(count) * 7 % 5 % 3).astype("int64")


def numbers(value):
    """Return Keras's results as lists: of tensors, arrays and scalars."""
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(each) for each in value]
    return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value, dtype="float64").tolist()


def weights(*models):
    """Return the weights of models as lists, by number."""
    return {f"{n}.{m}": numbers(each) for n, model in enumerate(models) for m, each in enumerate(model.get_weights())}


# -- fit and its relatives ---------------------------------------------------------------------------------------------


@program(**_KERAS)
def fit_evaluate_predict():
    import keras

    keras.utils.set_random_seed(1)
    x, y = data()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2", activity_regularizer="l1"),
                keras.layers.LayerNormalization(),
                keras.layers.Dropout(0.0),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    kept = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, validation_split=0.2, verbose=0).history
    weighted = model.fit(x, y, batch_size=8, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, shuffle=False, verbose=0).history
    each = np.linspace(0, 1, len(x)).astype("float32")
    sampled = model.fit(x, y, batch_size=8, sample_weight=each, shuffle=True, epochs=2, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=7, sample_weight=each, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=5, verbose=0)
    result = {"first": kept, "weighted": weighted, "sampled": sampled, "evaluated": evaluated, "predicted": predicted}
    return {**numbers(result), "weights": weights(model)}


@program(**_KERAS)
def fit_a_graph_of_layers():
    import keras

    keras.utils.set_random_seed(2)
    x, y = data()
    words = np.arange(44).reshape(22, 2) % 6
    with strategy.scope():
        read, seen = keras.Input((2,), dtype="int64", name="words"), keras.Input((4,), name="rows")
        h = keras.layers.GRU(5)(keras.layers.Embedding(6, 3, mask_zero=True)(read))
        both = keras.layers.Concatenate()([h, keras.layers.Dense(3, activation="relu")(seen)])
        shared = keras.layers.Dense(4, activation="tanh", name="shared")
        outputs = {
            "kind": keras.layers.Dense(3, name="kind")(shared(both)),
            "size": keras.layers.Dense(1, name="size")(shared(keras.ops.flip(both, axis=1))),
        }
        model = keras.Model({"words": read, "rows": seen}, outputs)
    # The model is compiled outside the scope.
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "huber"}
    model.compile("rmsprop", losses, loss_weights={"kind": 1.0, "size": 0.3}, metrics={"size": ["mae"]})
    targets = {"kind": y, "size": x.sum(axis=1, keepdims=True)}
    kept = model.fit({"words": words, "rows": x}, targets, batch_size=6, epochs=2, shuffle=False, verbose=0).history
    predicted = model.predict({"words": words, "rows": x}, batch_size=9, verbose=0)
    return {**numbers({"history": kept, "predicted": predicted}), "weights": weights(model)}


@program(**_KERAS)
def metrics_see_whole_batches():
    import keras

    keras.utils.set_random_seed(3)
    x, y = data()
    y = (y > 0).astype("float32")[:, None]

    class Largest(keras.metrics.Metric):
        """The largest output: updates that do not add up."""

        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self):
            return self.value

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
        more = [keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1", threshold=0.5), Largest()]
        more += [keras.metrics.R2Score(name="r2"), keras.metrics.Precision(name="precision"), "binary_accuracy"]
        model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=more)
    kept = model.fit(x, y, batch_size=5, epochs=3, shuffle=False, validation_data=(x[:7], y[:7]), verbose=0).history
    return {"history": numbers(kept), "evaluated": numbers(model.evaluate(x, y, batch_size=4, verbose=0))}


@program(**_KERAS)
def batch_by_batch():
    import keras

    keras.utils.set_random_seed(4)
    x, y = data()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.2, momentum=0.9), loss, metrics=["accuracy"])
    trained = [model.train_on_batch(x[:7], y[:7], return_dict=True) for _ in range(3)]
    model.layers[0].trainable = False
    trained.append(model.train_on_batch(x[7:], y[7:], class_weight={0: 2.0, 1: 1.0, 2: 1.0}, return_dict=True))
    tested = model.test_on_batch(x[:5], y[:5], return_dict=True)
    predicted = model.predict_on_batch(x[:1])
    return {**numbers({"trained": trained, "tested": tested, "predicted": predicted}), "weights": weights(model)}


@program(**_KERAS)
def kinds_of_data():
    import keras

    keras.utils.set_random_seed(5)
    x, y = data()

    class Batches(keras.utils.PyDataset):
        """Batches of 6 rows."""

        def __len__(self):
            return 4

        def __getitem__(self, number):
            return x[6 * number : 6 * number + 6], y[6 * number : 6 * number + 6]

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss)
    pairs = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    losses = [
        model.fit(torch.utils.data.DataLoader(pairs, batch_size=5), epochs=2, shuffle=False, verbose=0).history["loss"],
        model.fit(Batches(), shuffle=False, verbose=0).history["loss"],
        model.fit(torch.as_tensor(x), torch.as_tensor(y), batch_size=5, shuffle=False, verbose=0).history["loss"],
        model.fit(x, y, batch_size=4, steps_per_epoch=2, epochs=3, shuffle=False, verbose=0).history["loss"],
    ]
    return {"losses": numbers(losses), "weights": weights(model)}


# -- steps of the user's own -------------------------------------------------------------------------------------------


@program(**_KERAS)
def own_train_step():
    import keras

    keras.utils.set_random_seed(6)
    x, y = data()

    class Own(keras.Model):
        """A model with a step of its own, an added loss and a penalty of its inputs' gradient."""

        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2")
            self.head = keras.layers.Dense(3)
            self.seen = keras.metrics.Mean(name="seen")
            self.cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def call(self, x):
            h = self.first(x)
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(h)))
            return self.head(h)

        def train_step(self, batch):
            x, y = batch
            x = torch.as_tensor(x).detach().requires_grad_()
            self.zero_grad()
            predicted = self(x, training=True)
            each = self.cross(y, predicted)
            [slope] = torch.autograd.grad(each.sum(), x, retain_graph=True)
            loss = each.sum() / distnb.get_strategy().num_replicas_in_sync / x.shape[0] + sum(self.losses)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            self.seen.update_state(loss.detach(), sample_weight=x.shape[0])
            return {"seen": self.seen.result(), "slope": slope.norm(), "rows": float(x.shape[0])}

        def test_step(self, batch):
            x, y = batch
            self.seen.update_state(keras.ops.mean(self.cross(y, self(x, training=False))) + sum(self.losses))
            return {"seen": self.seen.result()}

        @property
        def metrics(self):
            return [self.seen]

    with strategy.scope():
        model = Own()
        model.compile(keras.optimizers.Adam(0.05))
    kept = model.fit(x, y, batch_size=5, epochs=3, shuffle=False, validation_data=(x, y), verbose=0).history
    return {"history": numbers(kept), "weights": weights(model)}


@program(**_KERAS)
def own_compute_loss():
    import keras

    keras.utils.set_random_seed(7)
    x, y = data()

    class Own(keras.Model):
        """The example of Keras's documentation of `compute_loss`, with a penalty and metrics of its own."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2")
            self.tracker = keras.metrics.Mean(name="tracker")

        def call(self, x, training=False):
            return self.dense(x) * (2.0 if training else 1.0)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = keras.ops.mean(keras.ops.square(y_pred - keras.ops.one_hot(y, 3)))
            loss += keras.ops.sum(self.losses) + 0.01 * keras.ops.sum(keras.ops.abs(self.dense.bias))
            self.tracker.update_state(loss)
            return loss

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            found = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**found, "tracker": self.tracker.result(), "mean": keras.ops.mean(y_pred)}

        def reset_metrics(self):
            self.tracker.reset_state()

    with strategy.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.1), metrics=["accuracy"])
    kept = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    return {**numbers({"history": kept, "evaluated": evaluated}), "weights": weights(model)}


@program(**_KERAS)
def two_models_in_a_step():
    import keras

    keras.utils.set_random_seed(8)
    x, _ = data()

    class Adversaries(keras.Model):
        """A generator and a discriminator, with an optimizer each."""

        def __init__(self):
            super().__init__()
            self.maker = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
            self.judge = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
            self.noise = keras.random.SeedGenerator(3)

        def call(self, x):
            return self.judge(x)

        def compile(self, maker, judge):
            super().compile()
            self.of_maker, self.of_judge = maker, judge
            self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

        def train_step(self, real):
            noise = keras.random.normal((len(real), 2), seed=self.noise)
            both = keras.ops.concatenate([self.maker(noise), real])
            wanted = keras.ops.concatenate([keras.ops.ones((len(real), 1)), keras.ops.zeros((len(real), 1))])
            judged = self.loss_of(wanted, self.judge(both))
            weights = self.judge.trainable_weights
            gradients = torch.autograd.grad(judged, [each.value for each in weights])
            with torch.no_grad():
                self.of_judge.apply(gradients, weights)
            self.zero_grad()
            fooled = self.loss_of(keras.ops.zeros((len(real), 1)), self.judge(self.maker(noise)))
            fooled.backward()
            weights = self.maker.trainable_weights
            with torch.no_grad():
                self.of_maker.apply([each.value.grad for each in weights], weights)
            return {"judged": judged.detach(), "fooled": fooled.detach()}

    with strategy.scope():
        model = Adversaries()
        model.compile(keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1))
    kept = model.fit(x, batch_size=6, epochs=2, shuffle=False, verbose=0).history
    return {"history": numbers(kept), "weights": weights(model.maker, model.judge)}


@program(**_KERAS)
def a_critic_with_a_gradient_penalty():
    import keras

    keras.utils.set_random_seed(15)
    x, _ = data()

    class Critic(keras.Model):
        """The critic of a WGAN-GP, several steps per batch, with noise that the step draws."""

        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)])
            self.steps = self.add_weight(name="steps", trainable=False, initializer="zeros")
            self.losses_seen = keras.metrics.Mean(name="loss")

        def call(self, x):
            return self.inner(x)

        def train_step(self, real):
            for _ in range(2):
                share = keras.random.uniform((len(real), 1), seed=int(self.steps))
                mixed = (real * share + (1 - share) * keras.ops.flip(real, axis=0)).requires_grad_()
                [slope] = torch.autograd.grad(self.inner(mixed).sum(), mixed, create_graph=True)
                penalty = (slope.square().sum(dim=1).sqrt() - 1).square().mean()
                loss = self.inner(keras.ops.zeros_like(real)).mean() - self.inner(real).mean() + 10 * penalty
                self.zero_grad()
                loss.backward()
                weights = self.inner.trainable_weights
                with torch.no_grad():
                    self.optimizer.apply_gradients(zip([each.value.grad for each in weights], weights, strict=True))
                self.steps.assign_add(1.0)
                self.losses_seen.update_state(loss.detach())
            return {**self.get_metrics_result(), "penalty": penalty.detach()}

    with strategy.scope():
        model = Critic()
        model.compile(keras.optimizers.Adam(0.02))
    kept = model.fit(x, batch_size=6, epochs=2, shuffle=False, verbose=0).history
    return {"history": numbers(kept), "weights": weights(model)}


@program(**_KERAS)
def a_student_and_a_moving_average():
    import keras

    keras.utils.set_random_seed(16)
    x, y = data()

    class Student(keras.Model):
        """A student that learns from a frozen teacher and keeps a moving average of itself and a queue of rows."""

        def __init__(self, teacher):
            super().__init__()
            self.teacher, self.student, self.average = teacher, network(), network()
            self.teacher.trainable = self.average.trainable = False
            self.queue = self.add_weight(name="queue", shape=(5, 3), trainable=False, initializer="zeros")
            self.apart = keras.metrics.Mean(name="apart")

        def call(self, x, training=False):
            return self.student(x, training=training)

        def train_step(self, batch):
            x, y = batch
            with torch.no_grad():
                wanted = keras.ops.softmax(self.teacher(x, training=False))
            self.zero_grad()
            output = self(x, training=True)
            apart = keras.losses.kl_divergence(wanted, keras.ops.softmax(output)).mean()
            near = (self.queue.value @ output.T).square().mean()
            loss = self.compute_loss(x, y, output) + apart + 0.1 * near
            loss.backward()
            weights = self.student.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([each.value.grad for each in weights], weights)
                for mine, averaged in zip(self.student.weights, self.average.weights, strict=True):
                    averaged.assign(0.9 * averaged.value + 0.1 * mine.value)
                self.queue.assign(torch.cat([output.detach(), self.queue.value])[:5])
            self.apart.update_state(apart.detach(), sample_weight=len(y))
            return self.compute_metrics(x, y, output)

    def network():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="gelu"), keras.layers.Dense(3)])

    with strategy.scope():
        model = Student(network())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(0.02), loss, metrics=["accuracy"])
    kept = model.fit(x, y, batch_size=5, epochs=3, shuffle=False, validation_data=(x, y), verbose=0).history
    return {"history": numbers(kept), "weights": weights(model.student, model.average)}


@program(**{**_KERAS, "under": (*_REPLICATED, "parameter_server")})
def own_loop():
    import keras

    keras.utils.set_random_seed(9)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
        optimizer, mean = keras.optimizers.Adam(0.05), keras.metrics.Mean()
        optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        each = (model(x) - y).pow(2).mean(dim=1)
        loss = distnb.nn.compute_average_loss(each)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        mean.update_state(each.detach())
        return loss.detach()

    x = rows(14, 4)
    losses = train(step, x, x.sum(dim=1, keepdim=True))
    return {"losses": losses, "mean": float(mean.result()), "weights": weights(model)}


# -- optimizers --------------------------------------------------------------------------------------------------------

_OF_FIT = {
    "all": """{
        "Adadelta": keras.optimizers.Adadelta(1.0),
        "Adafactor": keras.optimizers.Adafactor(0.1),
        "Adagrad": keras.optimizers.Adagrad(0.1),
        "Adam": keras.optimizers.Adam(0.05, amsgrad=True),
        "AdamW": keras.optimizers.AdamW(0.05, weight_decay=0.1),
        "Adamax": keras.optimizers.Adamax(0.05),
        "Ftrl": keras.optimizers.Ftrl(0.1, l2_regularization_strength=0.1),
        "Lamb": keras.optimizers.Lamb(0.05),
        "Lion": keras.optimizers.Lion(0.01),
        "Muon": keras.optimizers.Muon(0.05),
        "Nadam": keras.optimizers.Nadam(0.05),
        "RMSprop": keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
        "SGD": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        "ScheduleFreeAdamW": keras.optimizers.ScheduleFreeAdamW(0.05),
    }""",
    "options": """{
        "clipnorm": keras.optimizers.SGD(0.5, clipnorm=0.1),
        "global_clipnorm": keras.optimizers.SGD(0.5, global_clipnorm=0.1),
        "clipvalue": keras.optimizers.SGD(0.5, clipvalue=0.02),
        "ema": keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
        "accumulation": keras.optimizers.Adam(0.05, gradient_accumulation_steps=3),
        "schedule": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.3, 5), momentum=0.5),
        "loss scale": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
        "scale factor": keras.optimizers.Adam(0.05, loss_scale_factor=8.0),
    }""",
}


# Not in ordinary cells, where every block of the loop is a program of its own and sends all models made so far.
@program(
    cases={name: {"made": text} for name, text in _OF_FIT.items()},
    **{**_KERAS, "tolerance": 2e-4},
    modes=("cell", "script"),
)
def every_optimizer(made):
    import keras

    x, y = data()
    result = {}
    with strategy.scope():
        optimizers = eval(made)
    for name in list(optimizers):
        keras.utils.set_random_seed(10)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizers[name], loss)
        kept = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        result[name] = {"history": numbers(kept), "weights": weights(model)}
    return result


# -- callbacks ---------------------------------------------------------------------------------------------------------


@program(**_KERAS)
def callbacks_of_keras():
    import keras

    keras.utils.set_random_seed(11)
    x, y = data()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(3.0), loss)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.9 if epoch == 2 else 1.0)),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
    ]
    kept = model.fit(
        x, y, batch_size=8, epochs=12, shuffle=False, validation_data=(x[:9], y[:9]), callbacks=callbacks, verbose=0
    ).history
    rate = float(model.optimizer.learning_rate)
    return {"history": numbers(kept), "weights": weights(model), "rate": rate}


@program(**_KERAS)
def callbacks_change_the_model():
    import keras

    keras.utils.set_random_seed(12)
    x, y = data()

    class Scaled(keras.layers.Layer):
        """A layer with a plain attribute that callbacks change."""

        rate = 1.0

        def call(self, x):
            return x * self.rate

    class Changes(keras.callbacks.Callback):
        """Freeze, thaw, rescale, and change weights."""

        def on_epoch_end(self, epoch, logs=None):
            first, scaled, last = self.model.layers
            first.trainable = epoch != 0
            scaled.rate = 1.0 + epoch
            if epoch == 1:
                last.set_weights([each * 0.5 for each in last.get_weights()])
                self.model.optimizer.learning_rate = 0.01

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.layers[2].bias.assign_add([0.1, 0.0, -0.1])

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), Scaled(), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss)
    kept = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, callbacks=[Changes()], verbose=0).history
    return {"history": numbers(kept), "weights": weights(model)}


@program(**_KERAS)
def files_that_callbacks_write():
    import keras

    keras.utils.set_random_seed(17)
    x, y = data()
    folder = str(distnb.shared_folder())
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.3, use_ema=True, ema_momentum=0.8)
        model.compile(optimizer, loss, metrics=["accuracy"])
    best = keras.callbacks.ModelCheckpoint(
        folder + "/best.weights.h5", monitor="val_loss", save_best_only=True, save_weights_only=True
    )
    callbacks = [
        best,
        keras.callbacks.CSVLogger(folder + "/log.csv"),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ]
    kept = model.fit(
        x, y, batch_size=8, epochs=4, shuffle=False, validation_data=(x[:9], y[:9]), callbacks=callbacks, verbose=0
    ).history
    last = weights(model)
    model.load_weights(folder + "/best.weights.h5")
    if distnb.is_chief():
        shutil.rmtree(folder)
    return {"history": numbers(kept), "weights": last, "best": weights(model)}


# -- statistics and variables ------------------------------------------------------------------------------------------


def _expected_statistics(replicas):
    mean, variance = np.zeros(4), np.ones(4)
    for batch in np.split(data(24)[0].astype("float64"), 4):
        slices = np.array_split(batch, replicas)
        mean = mean * 0.9 + 0.1 * np.mean([each.mean(axis=0) for each in slices], axis=0)
        variance = variance * 0.9 + 0.1 * np.mean([each.var(axis=0) for each in slices], axis=0)
    return {"statistics": [mean.tolist(), variance.tolist()], "rows": 24.0, "calls": 4.0}


@program(expected=_expected_statistics, **_KERAS)
def statistics_of_layers():
    import keras

    x, _ = data(24)

    class Counts(keras.layers.Layer):
        """A layer that counts its rows and its calls."""

        def build(self, shape):
            self.rows = self.add_weight(name="rows", trainable=False, initializer="zeros", aggregation="sum")
            self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros")

        def call(self, x, training=False):
            if training:
                self.rows.assign_add(float(x.shape[0]))
                self.calls.assign_add(1.0)
            return x

    with strategy.scope():
        norm = keras.layers.BatchNormalization(momentum=0.9)
        model = keras.Sequential([keras.Input((4,)), Counts(), norm])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x, batch_size=6, shuffle=False, verbose=0)
    model.evaluate(x, x, batch_size=6, verbose=0)
    mean, variance = [each.numpy() for each in norm.non_trainable_weights]
    seen, calls = [float(each.numpy()) for each in model.layers[0].weights]
    return {"statistics": [mean.tolist(), variance.tolist()], "rows": seen, "calls": calls}


@program(**_KERAS)
def frozen_statistics_and_late_layers():
    import keras

    keras.utils.set_random_seed(13)
    x, y = data()

    class Late(keras.Model):
        """A frozen body with statistics, and a head that is built by the first call."""

        def __init__(self):
            super().__init__()
            self.body = keras.Sequential([keras.layers.Dense(5), keras.layers.BatchNormalization()])
            self.body.trainable = False
            self.head = None

        def call(self, x, training=False):
            return self.head(self.body(x, training=training))

    with strategy.scope():
        model = Late()
        model.head = keras.layers.Dense(3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    kept = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    with strategy.scope():
        copied = keras.models.clone_model(model.body)
        copied.set_weights(model.body.get_weights())
        model.compile(keras.optimizers.SGD(0.1), loss)
    kept["again"] = model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history["loss"]
    return {"history": numbers(kept), "weights": weights(model, copied)}


# -- torch's modules in Keras's models ---------------------------------------------------------------------------------

_OF_TORCH = Refusal(
    "ContextError", "sharded.md", "A weight of a Keras layer such as `Dense` raises an error", alone=True
)


@program(
    cases={
        "torch": {"inner": "keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 5), output_shape=(None, 5))"},
        "keras": {"inner": "keras.layers.Dense(5)", "refused": {"sharded": _OF_TORCH}, "under": ("sharded",)},
    },
    **{**_KERAS, "under": (*_REPLICATED, "sharded"), "samples": None},
)
def modules_of_torch(inner):
    import keras

    keras.utils.set_random_seed(14)
    x, y = data()
    with strategy.scope():
        head = keras.layers.TorchModuleWrapper(torch.nn.Linear(5, 3), output_shape=(None, 3))
        model = keras.Sequential([keras.Input((4,)), eval(inner), keras.layers.Activation("tanh"), head])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05, clipnorm=0.5), loss, metrics=["accuracy"])
    kept = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, validation_data=(x[:7], y[:7]), verbose=0).history
    predicted = model.predict(x, batch_size=9, verbose=0)
    return {**numbers({"history": kept, "predicted": predicted}), "weights": weights(model)}


@program(**{**_KERAS, "samples": 1})
def training_that_goes_on():
    import keras

    def layer(inputs, outputs):
        return keras.layers.TorchModuleWrapper(torch.nn.Linear(inputs, outputs), output_shape=(None, outputs))

    keras.utils.set_random_seed(18)
    x, y = data()
    with strategy.scope():
        # Twelve variables: Keras counts them in each process, and torch sorts `variable_10` before `variable_9`.
        body = [layer(4, 5), *(layer(5, 5) for _ in range(4)), keras.layers.Activation("tanh")]
        model = keras.Sequential([keras.Input((4,)), *body, layer(5, 3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
    kept = {"model": model}
    pause()
    model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    pause()
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, validation_data=(x, y), verbose=0).history
    counted = {"kept": len(kept), "steps": float(model.optimizer.iterations)}
    return {"history": numbers(history), "weights": weights(model), **counted}
