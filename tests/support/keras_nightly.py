"""Keras's next version, which the Makefile installs into a folder next to the environment's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

NIGHTLY = Path(sys.prefix, "keras-nightly")
"""The folder to put first on `sys.path` before Keras is imported."""

needs_nightly = pytest.mark.skipif(
    not (NIGHTLY / "keras").is_dir(), reason="Keras's nightly could not be installed (make .venv/.made-keras-nightly)"
)
