"""The examples in docstrings are correct."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import benchmarks
import distnb


def modules_with_examples() -> list[str]:
    """Return the names of modules whose docstrings have examples."""
    found = []
    for package in (distnb, benchmarks):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8") and path.stem != "__main__":
                name = ".".join([package.__name__, *path.relative_to(root).with_suffix("").parts])
                found.append(name.removesuffix(".__init__"))
    return found


@pytest.mark.features
@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_run(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0
