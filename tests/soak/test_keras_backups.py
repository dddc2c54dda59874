"""Keras's BackupAndRestore on two replicas: after a kill at any moment, training ends as if there had been none."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

ENVIRONMENT = {"KERAS_BACKEND": "torch"}
PROGRAM = """
import os, signal, sys
from pathlib import Path
import distnb, keras
from distnb.keras.callbacks import backups
from tests.keras.keras_cases import X, Y, LOGITS, mlp
strategy = distnb.MirroredStrategy()
lines, files = 0, {{backups.__file__, sys.modules["keras.src.callbacks.backup_and_restore"].__file__}}

def trace(frame, event, _):
    global lines
    if frame.f_code.co_filename not in files:
        return None
    lines += event == "line"
    if lines == {kill_at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

keras.utils.set_random_seed(0)
with strategy.scope():
    model = mlp(keras.layers.Dropout(0.3, seed=1))
    model.compile("adam", LOGITS, metrics=["accuracy"])
callbacks = [keras.callbacks.BackupAndRestore(Path({folder!r}), save_freq=3)]
if distnb.is_chief():
    sys.settrace(trace)
model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
sys.settrace(None)
result = lines, [each.tolist() for each in model.get_weights()]
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_backup_survives_a_kill_at_any_line_of_saving(tmp_path: Path) -> None:
    def run(folder: str, kill_at: int) -> list[object]:
        text = PROGRAM.format(folder=str(tmp_path / folder), kill_at=kill_at)
        return list(run_ranks(text, 2, timeout_s=100, env=ENVIRONMENT))

    lines, weights = run("whole", -1)[0].check().result
    for kill_at in range(lines // 9, lines, lines // 12):
        assert run(str(kill_at), kill_at)[0].returncode == -signal.SIGKILL
        for rank in run(str(kill_at), -1):
            assert rank.check().result[1] == weights, kill_at
