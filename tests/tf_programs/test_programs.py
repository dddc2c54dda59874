"""The seed documents' programs, with our names, under every strategy, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tf_programs.matrix import REFERENCE, cases

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.mark.parametrize(("program", "way"), cases())
def test_a_program_runs_as_a_script(launch: Callable[[str], list[dict[str, Any]]], program: str, way: str) -> None:
    [reference] = launch(REFERENCE)
    assert "error" not in reference[program], reference[program]["error"]
    for ended in launch(way):
        assert "error" not in ended[program], ended[program]["error"]
        same(ended[program]["result"], reference[program]["result"])


def same(got: Any, expected: Any, where: str = "result") -> None:
    """Return whether structures are equal, with numbers equal up to double precision's rounding."""
    assert type(got) is type(expected), f"{where}: {got!r} and {expected!r}"
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            same(got[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list):
        assert len(got) == len(expected), f"{where}: {got!r} and {expected!r}"
        for index, value in enumerate(expected):
            same(got[index], value, f"{where}[{index}]")
    else:
        assert got == (pytest.approx(expected, rel=1e-6, abs=1e-12) if isinstance(expected, float) else expected), where
