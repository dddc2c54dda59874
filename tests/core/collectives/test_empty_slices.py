"""Uneven and empty slices give one replica's numbers: metrics with every kind of state, `gather` and `reduce`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """Run all cases once on two replicas, and return each one's findings."""
    return [each.check().result for each in run_ranks("from tests.core.collectives.empty_slice_cases import result", 2)]


def test_metrics_accept_an_empty_slice(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["metrics"] == {}


def test_every_way_to_update_a_metric_accepts_an_empty_slice(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        # A batch value is the replica's own, and an empty slice has none.
        assert found["called"] == ([1.0, "nan"] if found["rank"] else [0.0, 1.0])
        assert found["called in a collection"] == (["nan", "nan"] if found["rank"] else [1.0, 1.0])
        assert found["accumulated"] == 0.75
        assert found["synchronised on each step"] == [0.5, 1.0]
        assert found["collection"] == {"first": 0.75, "second": 1.0}
        assert found["keras"] == 0.75
        assert found["by keyword"] == 0.75
        assert found["outside run"] == 0.75
        assert found["not made in a scope"] == 0.75
        assert found["images without boxes"] == 2
        assert found["copied"] == 0.75
        assert "before any replica updated" in found["never updated"]
        assert found["warnings"] == []


def test_an_error_of_torch_about_an_empty_slice_names_the_cure(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["rank"] == 0 or "drop_last=True" in found["what torch refuses"]


def test_gather_and_reduce_accept_an_empty_slice(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["gathered"] == [[6.0, 8.0]]
        assert found["reduced"] == [6.0, 8.0, 6.0, 8.0]
