"""Process groups: every operation, access through torch and libraries, generations, aborts, exits."""

from __future__ import annotations

import functools

import pytest

from tests.core.collectives.group_cases import Ended
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

GOOD = ["everything", "functional", "training_with_ddp", "mesh", "own_lines", "slow_replica", "far_ahead"]
ABORTED = ["aborted_receive", "aborted_deadlock", "aborted_future", "aborted_before"]


@functools.cache
def outcomes(size: int) -> list[dict[str, Ended]]:
    program = f"""
    from tests.core.collectives import group_cases
    result = group_cases.run({[*GOOD, *ABORTED, "sum_after_all"]!r})
    """
    return [rank.check().result for rank in run_ranks(program, size, timeout_s=120)]


@pytest.fixture(params=[2, pytest.param(3, marks=[pytest.mark.timeout(200), pytest.mark.soak])])
def ended(request: pytest.FixtureRequest) -> list[dict[str, Ended]]:
    return outcomes(request.param)


@pytest.mark.parametrize("name", GOOD)
def test_a_group_case_succeeds(ended, name):
    assert not any(rank[name].error for rank in ended), [rank[name] for rank in ended]


def test_operations_return_the_expected_values(ended):
    size = len(ended)
    for replica, rank in enumerate(ended):
        assert rank["everything"].value == ("gloo", size, str(replica))
        assert rank["functional"].value == (size * (size + 1) / 2, size, [size, size])
        assert rank["mesh"].value == ([float(i) for i in range(8)], size)
        assert rank["slow_replica"].value == size
        assert rank["training_with_ddp"].value == ended[0]["training_with_ddp"].value


@pytest.mark.parametrize("name", ABORTED)
def test_an_abort_ends_waits_at_once(ended, name):
    for rank in ended:
        outcome = rank[name]
        if name == "aborted_future":
            assert outcome.error in ("RuntimeError", "ProgramAborted")
        else:
            assert outcome.error == "ProgramAborted"
        assert "the test wants it" in outcome.text


def test_sums_are_correct_after_aborts(ended):
    assert [rank["sum_after_all"].value for rank in ended] == [len(ended)] * len(ended)
