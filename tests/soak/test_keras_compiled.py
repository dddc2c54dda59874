"""Keras with jit_compile: the compiler takes its time, and the numbers are one process's."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

PROGRAM = """
import numpy as np, keras, distnb
strategy = distnb.MirroredStrategy() if {several} else distnb.get_strategy()
X = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile={several})
result = model.fit(X, Y, batch_size=16, epochs=2, verbose=0).history["loss"]
"""


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_compiled_step_trains_on_two_replicas() -> None:
    ended = {
        replicas: [
            each.check().result
            for each in run_ranks(
                PROGRAM.format(several=replicas > 1), replicas, timeout_s=350, env={"KERAS_BACKEND": "torch"}
            )
        ]
        for replicas in (1, 2)
    }
    for losses in ended[2]:
        assert losses == pytest.approx(ended[1][0], abs=1e-5)
