"""The modes of Keras."""

from __future__ import annotations

from distnb.compat.keras_core import read_random_state, read_settings, write_random_state, write_settings
from distnb.objects.modes.mode import Mode
from distnb.objects.modes.seeds import random_mode

__all__ = ["MODES"]

MODES: tuple[Mode, ...] = (
    Mode(name="Keras's settings", capture=read_settings, apply=write_settings, early=True),
    random_mode("keras.random", read_random_state, write_random_state),
)
