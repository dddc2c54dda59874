"""Keras models made in a scope: fit, evaluate and predict have one process's numbers on any number of replicas."""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.keras_nightly import NIGHTLY, needs_nightly
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]
ENVIRONMENT = {"KERAS_BACKEND": "torch"}
CASES = {
    "keras_cases": [
        "refused", "distributed_data", "different_data", "reductions", "averaged_gradients", "several_steps_at_once",
        "masks", "kinds_of_data", "mixed_precision", "predicted_before_it_is_built", "fitted_in_the_scope",
        "built_by_its_first_call",
    ],
    "keras_callback_cases": [
        "dropout", "checkpoint", "model_checkpoint", "backup_and_restore", "errors", "after_batches", "not_a_number",
        "logs", "batch_logs", "own_callbacks", "tensorboard", "saved_and_loaded",
    ],
    "keras_state_cases": [
        "counted", "central", "called_in_run", "of_distributed_values", "made_elsewhere", "variables", "in_models",
        "checkpoints", "refused_in_scopes",
    ],
}  # fmt: skip


Ran = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return each replica's results, for this many replicas, with Keras's release or nightly."""

    @functools.cache
    def run(replicas: int, keras: str = "release") -> list[dict[str, Any]]:
        made = "distnb.MirroredStrategy()" if replicas > 1 else "distnb.get_strategy()"
        folder = str(tmp_path_factory.mktemp("keras"))
        program = (
            f"sys.path[:0] = {[str(NIGHTLY)] if keras == 'nightly' else []}\nimport distnb\n"
            f"from tests.keras.keras_cases import run_all\nresult = run_all({CASES!r}, {made}, {folder!r})"
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


@pytest.mark.parametrize(
    ("replicas", "keras"),
    [
        (2, "release"),
        pytest.param(3, "release", marks=pytest.mark.soak),
        pytest.param(4, "release", marks=pytest.mark.soak),
        pytest.param(2, "nightly", marks=[needs_nightly, pytest.mark.soak]),
    ],
)
@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_training_equals_one_process(ran: Ran, case: str, replicas: int, keras: str) -> None:
    (alone,) = ran(1, keras)
    assert "error" not in alone[case], alone[case]["error"]
    tolerance = 2e-2 if case == "mixed_precision" else 1e-5
    for result in ran(replicas, keras):
        assert result["replicas"] == replicas
        assert result["keras"].startswith("3.16") is (keras == "nightly")
        assert "error" not in result[case], result[case]["error"]
        assert not differences(alone[case]["value"], result[case]["value"], tolerance)
        assert result[case] == ran(replicas, keras)[0][case], "to the last bit the same on all replicas"


KILLED = """
import os, signal
from pathlib import Path
import distnb, keras
from tests.keras.keras_cases import X, Y, LOGITS, mlp
strategy = distnb.MirroredStrategy()
folder = Path({folder!r})

class Dies(keras.callbacks.Callback):
    def __init__(self):
        self.epoch = -1
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == {dies}:
            os.kill(os.getpid(), signal.SIGKILL)

def train(callbacks):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = mlp(keras.layers.Dropout(0.3, seed=1))
        model.compile("adam", LOGITS, metrics=["accuracy"])
    history = model.fit(X, Y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks).history
    return history, [each.tolist() for each in model.get_weights()]

whole = train([])
result = whole, train([keras.callbacks.BackupAndRestore(folder, save_freq={save_freq!r}), Dies()])
"""


@pytest.mark.parametrize(("save_freq", "resumed"), [pytest.param("epoch", 2, marks=pytest.mark.soak), (3, 2)])
def test_a_killed_script_resumes_when_it_is_started_again(tmp_path: Path, save_freq: str | int, resumed: int) -> None:
    """Kill a script in the third epoch, after five of seven batches, and check that its shuffles also continue."""
    folder = tmp_path / "backup"

    def program(dies: tuple[int, int] | None) -> str:
        return KILLED.format(folder=str(folder), dies=dies, save_freq=save_freq)

    first = run_ranks(program((2, 4)), 2, timeout_s=100, env=ENVIRONMENT)
    assert first[0].returncode == -signal.SIGKILL
    assert first[1].returncode != 0, "it does not wait forever"
    for rank in run_ranks(program(None), 2, timeout_s=100, env=ENVIRONMENT):
        (history, weights), (went_on, its_weights) = rank.check().result
        for name, values in history.items():
            assert went_on[name] == pytest.approx(values[resumed:], abs=1e-6), name
        assert not differences(weights, its_weights, 1e-6)
    assert not folder.exists(), "a successful training leaves no backup"
