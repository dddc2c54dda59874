"""Registration of Keras's classes that hold variables: their instances stay on the engines."""

import keras

from distnb.runtime.inspection.device_objects import register_device_types

register_device_types(
    keras.Variable,
    keras.KerasTensor,  # it belongs to a graph of layers
    keras.layers.Layer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
