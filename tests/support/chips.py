"""The environment in which a process finds a fake TPU package, with two chips."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CHIPS"]

_ROOT = Path(__file__).parents[2]
CHIPS = {
    "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT / "tests" / "fake_tpu"))),
    "FAKE_TPU_CHIPS": "2",
    "CUDA_VISIBLE_DEVICES": "",
}
