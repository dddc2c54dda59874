"""Keras models made in a scope: fit, evaluate and predict have one process's numbers on any number of replicas."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(170)
ENVIRONMENT = {"KERAS_BACKEND": "torch"}
CASES = [
    "built_when_it_fits", "compiled_outside", "reductions", "own_step", "added_loss", "masks",
    "several_inputs_and_outputs", "torch_module", "kinds_of_data", "mixed_precision", "batch_by_batch",
    "predicted_before_it_is_built", "scope_in_a_function",
]  # fmt: skip


@functools.cache
def ran(replicas: int) -> list[dict[str, Any]]:
    made = "distnb.MirroredStrategy()" if replicas > 1 else "distnb.get_strategy()"
    program = f"import distnb\nfrom tests.multiprocess import keras_cases\nresult = keras_cases.run_all({made})"
    return [each.check().result for each in run_ranks(program, replicas, timeout_s=150, env=ENVIRONMENT)]


def differences(one: Any, other: Any, tolerance: float, path: str = "") -> list[str]:
    if isinstance(one, dict):
        if not isinstance(other, dict) or list(one) != list(other):
            return [f"{path}: {one!r:.200} and {other!r:.200}"]
        return [each for key in one for each in differences(one[key], other[key], tolerance, f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if not isinstance(other, (list, tuple)) or len(one) != len(other):
            return [f"{path}: {one!r:.200} and {other!r:.200}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in pairs for found in differences(a, b, tolerance, f"{path}[{i}]")]
    return [] if math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) else [f"{path}: {one} and {other}"]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_it_has_one_process_numbers(case: str, replicas: int) -> None:
    (alone,) = ran(1)
    assert "error" not in alone[case], alone[case]["error"]
    tolerance = 2e-2 if case == "mixed_precision" else 1e-5
    for result in ran(replicas):
        assert result["replicas"] == replicas
        assert "error" not in result[case], result[case]["error"]
        assert not differences(alone[case]["value"], result[case]["value"], tolerance)
        assert result[case] == ran(replicas)[0][case], "to the last bit the same on all replicas"
