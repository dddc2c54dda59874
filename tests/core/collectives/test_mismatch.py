"""Mismatched collectives are found within a second and have no lasting effect."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.core.collectives.group_cases import Ended
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

MISMATCHES = {
    "other_operation": [
        "replica 0 called distnb's all_reduce(float32[10], sum) at group_cases.py, line",
        " called distnb's broadcast(float32[10], root=0)",
    ],
    "other_operation_late": ["all_reduce(float32[10], sum)", "all_gather(float32[10])"],
    "other_shape_known": ["float32[10]", "float32[20]", "collective number 41"],
    "other_shape_large": ["float32[2000000]", "float32[1000000]"],
    "other_dtype": ["int64[8]", "float64[8]"],
    "other_reduce_op": ["sum", "max"],
    "other_root": ["root=0", "root=1"],
    "swapped_order": ["different order", "all_reduce(float32[5], sum)"],
    "swapped_order_in_a_loop": ["different order"],
    "other_order_of_subgroups": ["new_group"],
    "subgroup_apart": ["float32[2]", "float32[3]"],
    "whole_against_part": ["wait for each other", "float32[2]", "float32[3]"],
    "whole_against_unconnected_part": ["wait for each other", "the first collective"],
}
MISSING = {
    "fewer_calls": ["all_reduce(float32[3], sum)", "replica 1 finished its program after 1 collectives"],
    "fewer_calls_late": ["barrier()", "replica 1 finished its program after 0 collectives"],
    "subgroup_unused": ["finished its program without using that group"],
}
# Detected by one replica only, or as another error.
OTHERS = ["never_waited", "backward_against_all_reduce", "refused_arguments", "splits_apart", "other_error"]
NAMES = [name for each in [*MISMATCHES, *MISSING, *OTHERS] for name in (each, "sum_after_all")]


@functools.cache
def outcomes(size: int) -> list[dict[str, Ended]]:
    program = f"""
    from tests.core.collectives import group_cases
    names = {NAMES!r}
    cases = group_cases.CASES
    for index, name in enumerate(names):
        # A name for each run, since each is a meeting point too.
        cases[f"{{name}} {{index}}"] = cases[name]
    ended = group_cases.run([f"{{name}} {{index}}" for index, name in enumerate(names)])
    result = {{"sum_after_all": [e.value for name, e in ended.items() if name.startswith("sum_after_all")]}}
    result.update({{name.split()[0]: e for name, e in ended.items() if not name.startswith("sum_after_all")}})
    """
    return [rank.check().result for rank in run_ranks(program, size, timeout_s=120)]


@pytest.fixture(params=[2, pytest.param(4, marks=[pytest.mark.timeout(200), pytest.mark.soak])])
def ended(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return outcomes(request.param)


@pytest.mark.parametrize("name", MISMATCHES)
def test_every_replica_raises_and_names_both_collectives(ended, name):
    for rank in ended:
        outcome = rank[name]
        assert outcome.error == "CollectiveMismatchError", outcome
        assert "group_cases.py, line" in outcome.text
    for part in MISMATCHES[name]:
        assert any(part in rank[name].text for rank in ended), ended[0][name].text


@pytest.mark.parametrize("name", MISSING)
def test_a_waiting_replica_names_the_one_that_left(ended, name):
    # With "subgroup_unused" all others leave: each before or after replica 0 reports its error.
    waiting = ended[:1] if name == "subgroup_unused" else [ended[0], *ended[2:]]
    for outcome in [rank[name] for rank in waiting]:
        assert outcome.error == "CollectiveMismatchError", outcome
        for part in MISSING[name]:
            assert part in outcome.text
    if name != "subgroup_unused":
        assert not ended[1][name].error


def test_a_collective_without_a_wait_is_missed_too(ended):
    found = [rank["never_waited"] for rank in ended]
    assert any(each.error == "CollectiveMismatchError" and "without calling it" in each.text for each in found), found


def test_a_backward_pass_of_ddp_does_not_match_an_all_reduce(ended):
    first, *others = [rank["backward_against_all_reduce"] for rank in ended]
    # DDP waits in C++, which does not know our errors. The text is the same.
    assert first.error in ("RuntimeError", "CollectiveMismatchError")
    for each in (first, *others):
        assert "float32[7]" in each.text


def test_arguments_refused_on_one_replica_end_the_program(ended):
    for rank in ended:
        outcome = rank["refused_arguments"]
        # The replica that passed them has caught its own error, and is ended at the next collective.
        assert outcome.error in ("CollectiveMismatchError", "CollectiveError", "ProgramAborted"), outcome
    assert any("which failed with" in rank["refused_arguments"].text for rank in ended)
    assert any("although the program went on after it" in rank["refused_arguments"].text for rank in ended)


def test_mismatched_splits_are_an_error(ended):
    assert any("output_split_sizes" in rank["splits_apart"].text for rank in ended)
    assert all(rank["splits_apart"].error for rank in ended)


def test_an_error_of_one_replica_ends_the_others_without_a_notebook(ended):
    for replica, rank in enumerate(ended):
        outcome = rank["other_error"]
        assert outcome.error == ("ValueError" if replica == 1 else "CollectiveError")
        assert replica == 1 or "Replica 1 ended with an error" in outcome.text


def test_the_next_generation_has_all_replicas(ended):
    for rank in ended:
        assert rank["sum_after_all"] == [len(ended)] * (len(NAMES) // 2)
