"""Keras models made in a scope: fit, evaluate and predict have one process's numbers on any number of replicas."""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(170)
ENVIRONMENT = {"KERAS_BACKEND": "torch"}
CASES = [
    "refused",
    "built_when_it_fits", "compiled_outside", "reductions", "own_step", "added_loss", "masks",
    "several_inputs_and_outputs", "torch_module", "kinds_of_data", "mixed_precision", "batch_by_batch",
    "predicted_before_it_is_built", "scope_in_a_function", "fitted_in_the_scope",
]  # fmt: skip


CALLBACK_CASES = [
    "dropout",
    "checkpoint", "moving_statistics", "model_checkpoint", "backup_and_restore", "early_stopping", "rates", "after_batches", "not_a_number", "logs",
    "own_callbacks", "saved_and_loaded",
]  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each replica got, of so many."""

    @functools.cache
    def run(replicas: int) -> list[dict[str, Any]]:
        made = "distnb.MirroredStrategy()" if replicas > 1 else "distnb.get_strategy()"
        folder = str(tmp_path_factory.mktemp("keras"))
        program = (
            "import distnb\nfrom tests.multiprocess import keras_callback_cases, keras_cases\n"
            f"result = keras_cases.run_all({made}) | keras_callback_cases.run_all({made}, {folder!r})"
        )
        return [each.check().result for each in run_ranks(program, replicas, timeout_s=150, env=ENVIRONMENT)]

    return run


def differences(one: Any, other: Any, tolerance: float, path: str = "") -> list[str]:
    if isinstance(one, dict):
        if not isinstance(other, dict) or list(one) != list(other):
            return [f"{path}: {list(one)} and {list(other) if isinstance(other, dict) else other!r:.200}"]
        return [each for key in one for each in differences(one[key], other[key], tolerance, f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if not isinstance(other, (list, tuple)) or len(one) != len(other):
            return [f"{path}: {one!r:.200} and {other!r:.200}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in pairs for found in differences(a, b, tolerance, f"{path}[{i}]")]
    if isinstance(one, str):
        return [] if one == other else [f"{path}: {one!r:.200} and {other!r:.200}"]
    return [] if math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) else [f"{path}: {one} and {other}"]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("case", [*CASES, *CALLBACK_CASES])
def test_it_has_one_process_numbers(ran: Callable[[int], list[dict[str, Any]]], case: str, replicas: int) -> None:
    (alone,) = ran(1)
    assert "error" not in alone[case], alone[case]["error"]
    tolerance = 2e-2 if case == "mixed_precision" else 1e-5
    for result in ran(replicas):
        assert result["replicas"] == replicas
        assert "error" not in result[case], result[case]["error"]
        assert not differences(alone[case]["value"], result[case]["value"], tolerance)
        assert result[case] == ran(replicas)[0][case], "to the last bit the same on all replicas"


KILLED = """
import os, signal
from pathlib import Path
import distnb, keras
from tests.multiprocess.keras_cases import X, Y, LOGITS, mlp
strategy = distnb.MirroredStrategy()
folder = Path({folder!r})

class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and {dies}:
            os.kill(os.getpid(), signal.SIGKILL)

def train(callbacks):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = mlp()
        model.compile("adam", LOGITS)
    return model.fit(X, Y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]

whole = train([])
result = whole, train([keras.callbacks.BackupAndRestore(folder), Dies()])
"""


def test_a_script_that_was_killed_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    first = run_ranks(KILLED.format(folder=str(folder), dies=True), 2, timeout_s=100, env=ENVIRONMENT)
    assert first[0].returncode == -signal.SIGKILL
    assert first[1].returncode != 0, "it does not wait for ever"
    for rank in run_ranks(KILLED.format(folder=str(folder), dies=False), 2, timeout_s=100, env=ENVIRONMENT):
        whole, went_on = rank.check().result
        assert went_on == pytest.approx(whole[2:], abs=1e-6)
    assert not folder.exists(), "a training that ended well leaves no backup"
