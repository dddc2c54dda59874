"""The strategy matrix as a fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tf_programs import matrix


@pytest.fixture(scope="session")
def launch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """Run the programs selected in this run of pytest, once for each strategy."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [(each["program"], each["way"]) for each in params if {"program", "way"} <= set(each)]
    return matrix.launcher(selected, tmp_path_factory.mktemp("seeds"))
