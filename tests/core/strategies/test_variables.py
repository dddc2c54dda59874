"""Variables with one copy: under the default and one-device strategies; and errors in all cases."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import distnb


def test_a_plain_variable_is_a_tensor_that_can_be_assigned_to() -> None:
    variable = distnb.Variable(10.0, name="v")
    assert variable.assign_add(2) is variable
    assert float(variable.assign_sub(torch.tensor(4.0))) == 8.0
    assert (variable.item(), int(variable), variable.numpy().shape, variable.name) == (8.0, 8, (), "v")
    variable += 1
    assert isinstance(variable, distnb.Variable)
    assert isinstance(variable, torch.nn.Parameter)
    before = variable.read_value()
    variable.assign(np.float64(3))
    assert (before.item(), variable.value().item()) == (9.0, 3.0)
    assert type(variable * 2) is torch.Tensor
    assert "'v'" in repr(variable)
    assert f"{variable:.2f} of {variable}" == f"{float(variable):.2f} of {variable!r}"
    assert "3." in repr(variable)


def test_initial_values_are_converted() -> None:
    source = torch.ones(2)
    variable = distnb.Variable(source)
    variable.assign_add([1.0, 2.0])
    assert source.tolist() == [1.0, 1.0]
    assert variable.tolist() == [2.0, 3.0]
    assert distnb.Variable(lambda: [1, 2]).dtype is torch.int64
    assert distnb.Variable(1, dtype=torch.float64).dtype is torch.float64
    assert distnb.Variable(variable).tolist() == [2.0, 3.0]
    with pytest.raises(TypeError, match="number, a list"):
        distnb.Variable("text")


@pytest.mark.parametrize("synchronization", ["auto", "on_write", "ON_READ"])
@pytest.mark.parametrize("aggregation", ["none", "SUM", "mean", distnb.VariableAggregation.ONLY_FIRST_REPLICA])
def test_synchronization_and_aggregation_have_no_effect_in_one_process(synchronization: Any, aggregation: Any) -> None:
    one = distnb.OneDeviceStrategy("cpu:0")
    for scope, run in ((one.scope(), one.run), (distnb.get_strategy().scope(), lambda fn: fn())):
        with scope:
            variable = distnb.Variable(10.0, synchronization=synchronization, aggregation=aggregation)
        run(lambda variable=variable: variable.assign_add(2.0))
        assert (float(variable), (variable.assign(1.0) + 1).item()) == (12.0, 2.0)


def test_trainable_sets_requires_grad() -> None:
    assert distnb.Variable(1.0).trainable
    assert distnb.Variable(1.0).requires_grad
    assert not distnb.Variable(1).trainable
    assert not distnb.Variable(1.0, synchronization="on_read").requires_grad
    variable = distnb.Variable([1.0, 2.0])
    (variable * variable).sum().backward()
    assert variable.grad is not None
    assert variable.grad.tolist() == [2.0, 4.0]
    torch.optim.SGD([variable], lr=1.0).step()
    assert variable.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"synchronization": "none"}, "plain tensor"),
        ({"synchronization": "sometimes"}, "ON_READ"),
        ({"aggregation": "max"}, "ONLY_FIRST_REPLICA"),
        ({"aggregation": "mean", "dtype": torch.int64}, "whole number"),
        ({"aggregation": "sum", "dtype": torch.bool}, "booleans"),
        ({"trainable": True, "synchronization": "on_read"}, "trainable=False"),
        ({"trainable": True, "dtype": torch.int64}, "gradients"),
        ({"name": 3}, "string"),
        ({"dtype": "float32"}, "torch.float32"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        distnb.Variable(1.0, **options)


def test_mismatched_values_are_refused() -> None:
    whole = distnb.Variable([1, 2])
    with pytest.raises(TypeError, match="would lose information"):
        whole.assign_add(0.5)
    with pytest.raises(ValueError, match=r"shape \[3\]"):
        whole.assign([1, 2, 3])
    with pytest.raises(TypeError, match="reduce"):
        whole.assign(distnb.PerReplica([1, 2]))
    assert whole.tolist() == [1, 2]


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_a_variable_works_in_a_module(synchronization: str) -> None:
    module = torch.nn.Module()
    module.v = distnb.Variable(3.0, synchronization=synchronization, trainable=False)
    assert [name for name, _ in module.named_parameters()] == ["v"]
    state = module.state_dict()
    assert type(state["v"]) is torch.Tensor
    module.load_state_dict({"v": torch.tensor(5.0)})
    assert float(module.v) == 5.0
    variable = module.v
    assert module.double().v is variable
    assert (variable.dtype, float(variable)) == (torch.float64, 5.0)
    copied = copy.deepcopy(module)
    copied.v.assign(1.0)
    again = pickle.loads(pickle.dumps(module)).v
    assert (float(copied.v), float(variable), float(again), type(again)) == (1.0, 5.0, 5.0, type(variable))


def test_variables_of_another_strategy_are_refused() -> None:
    first, second = distnb.OneDeviceStrategy("cpu:0"), distnb.OneDeviceStrategy("cpu")
    assert first is second
    default = distnb.Variable(1.0)
    with first.scope():
        variable = distnb.Variable(1.0)
        default.assign(2.0)
    assert variable.distribute_strategy is first
    assert float(variable.assign(3.0)) == 3.0  # outside the scope, by way of the strategy that it remembers
    assert first.run(lambda: variable + default).item() == 5.0
