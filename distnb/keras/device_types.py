"""The types of Keras's objects that hold variables, and stay on the engines. Keras pickles some of them as files."""

import keras

from distnb.strategies.device_objects import register_device_types

register_device_types(
    keras.Variable,
    keras.layers.Layer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
