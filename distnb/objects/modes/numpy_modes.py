"""The modes of NumPy."""

from __future__ import annotations

from typing import Any

import numpy

from distnb.objects.modes.mode import Mode

__all__ = ["MODES"]


def _printing() -> dict[str, Any]:
    # Formatters are functions, mostly defined in the notebook.
    options: dict[str, Any] = dict(numpy.get_printoptions())
    return {name: value for name, value in options.items() if name not in ("formatter", "override_repr")}


def _set_printing(options: dict[str, Any]) -> None:
    numpy.set_printoptions(**options)


MODES: tuple[Mode, ...] = (Mode(name="numpy printing", capture=_printing, apply=_set_printing, when="beginning"),)
