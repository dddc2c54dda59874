"""A model's parameters have the same order and names in a copy, for which Keras counts and nests layers again."""

from __future__ import annotations

import pickle
from typing import Any

import keras
import pytest
from keras import layers

from distnb.keras.parameter_names import same_everywhere


def nested() -> Any:
    body = keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.Dense(6)])
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(body(inputs)))  # its head's name comes first, and last in a copy


def long() -> Any:
    return keras.Sequential([keras.Input((1,)), *(layers.Dense(width) for width in range(2, 14))])


@pytest.mark.parametrize("make", [nested, long])
def test_a_copys_parameters_have_the_order_and_names_of_the_original(make: Any) -> None:
    model = make()
    copied = pickle.loads(pickle.dumps(model))
    mine, its = (same_everywhere(each, each.named_parameters()) for each in (model, copied))
    assert [(name, value.tolist()) for name, value in mine] == [(name, value.tolist()) for name, value in its]
    assert len(mine) == len(model.variables)
