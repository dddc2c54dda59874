"""The programs as scripts on several processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.ways import TIME_LIMIT_S, Way, cases, judge, named, run_scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(TIME_LIMIT_S)]


@pytest.fixture(scope="module")
def launch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Way], dict[str, list[dict[str, Any]]]]:
    """Run the programs that are selected for a way, once."""
    selected = [
        (item.callspec.params["program"], item.callspec.params["way"])
        for item in request.session.items
        if item.fspath == request.node.fspath and hasattr(item, "callspec")
    ]
    folder = tmp_path_factory.mktemp("conformance")
    return functools.cache(lambda way: run_scripts([name for name, under in selected if under == way], way, folder))


@pytest.mark.parametrize(("engines", "program", "way"), cases("script"))
def test_a_program_is_right_or_refused(
    launch: Callable[[Way], dict[str, list[dict[str, Any]]]], engines: str, program: str, way: Way
) -> None:
    for outcome in launch(way)[program]:
        judge(named(program), way, outcome)
