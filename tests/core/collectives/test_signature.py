"""The collective log's record of a call: its signature and its call site."""

from __future__ import annotations

import pytest
import torch

from distnb.collectives.verify import callsite, signature


def test_signatures_are_described_in_words():
    tensor = torch.zeros(10, 3, dtype=torch.int32)
    assert signature.describe(signature.of_tensors("all_reduce", 0, None, [tensor])) == "all_reduce(int32[10, 3], sum)"
    assert signature.describe(signature.of_tensors("broadcast", None, 2, [tensor[0]])) == "broadcast(int32[3], root=2)"
    assert signature.describe(("all_gather", "axis=0", None, "cpu")) == "all_gather(axis=0)"
    many = signature.describe(signature.of_tensors("all_reduce_coalesced", 4, None, [tensor] * 9))
    assert many.endswith("… 9 tensors, max)")


@pytest.mark.parametrize(
    "other",
    [
        signature.of_tensors("all_reduce", 0, None, [torch.zeros(4)]),
        signature.of_tensors("all_reduce", 0, None, [torch.zeros(3, dtype=torch.float64)]),
        signature.of_tensors("all_reduce", 4, None, [torch.zeros(3)]),
        signature.of_tensors("reduce", 0, 1, [torch.zeros(3)]),
        signature.of_tensors("all_reduce", 0, None, [torch.zeros(3, device="meta")]),
        signature.of_tensors("all_reduce", 0, None, [torch.zeros(3), torch.zeros(3)]),
    ],
)
def test_signatures_differ(other):
    mine = signature.record(signature.of_tensors("all_reduce", 0, None, [torch.zeros(3)]))
    assert mine.signature != signature.record(other).signature


def test_a_call_site_is_the_innermost_line_and_its_callers():
    def inner():
        return callsite.current()

    def outer():
        return inner()

    here, there = inner(), outer()
    assert str(here) == str(there)
    assert str(here) == f"test_signature.py, line {here.line}: return callsite.current()"
    assert here.identity[:8] == there.identity[:8]
    assert here.identity != there.identity


def test_lines_of_libraries_are_left_out():
    class Module(torch.nn.Module):
        def forward(self, x):
            return callsite.current()

    place = torch.nn.Sequential(Module())(torch.zeros(1)).place
    assert place.startswith("test_signature.py, line ")
