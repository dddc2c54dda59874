"""Gradient aggregation on 2, 3 and 4 processes, compared with one replica on the whole batch."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

_FOLDER = Path(__file__).with_name("gradient_cases")


def _names() -> list[str]:
    nodes = [node for file in sorted(_FOLDER.glob("*.py")) for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "case" for mark in node.decorator_list)
    ]


@functools.cache
def _results(n: int) -> dict[str, str | None]:
    program = "from tests.core.collectives.gradient_cases.run import run_cases\nresult = run_cases()"
    found: dict[str, str | None] = run_ranks(program, n, timeout_s=150)[0].check().result
    return found


# An odd number of replicas trains in test_semantics_training.py.
@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 4))])
@pytest.mark.parametrize("name", _names())
def test_gradients_equal_those_of_one_replica(name: str, n: int) -> None:
    failure = _results(n)[name]
    assert failure is None, failure
