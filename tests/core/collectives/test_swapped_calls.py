"""Equal collectives at different lines: a different order is an error, separate lines are fine, doubt is a warning."""

from __future__ import annotations

import functools

import pytest

from tests.support.kernel import Notebook
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes

PROLOGUE = """
import warnings
import torch.distributed as dist
from distnb.collectives.group.memberships import memberships
memberships.join_from_env()
first, a, b = dist.get_rank() == 0, torch.ones(4), torch.full((4,), 10.0)
def reduced(tensor):
    dist.all_reduce(tensor)
    return tensor
def add(tensor):
    return reduced(tensor)
warned = []
warnings.showwarning = lambda message, category, file, line, *rest: warned.append((str(message), line))
try:
    run()
    memberships.program_completed()
    result = ("", "", warned)
except Exception as error:
    result = (type(error).__name__, str(error), warned)
    memberships.program_failed()
"""
FINE = """
    part = dist.new_group(list(range(dist.get_world_size())))
    if first:
        dist.all_reduce(a)
        works = [dist.all_reduce(b, async_op=True)]
    else:
        dist.all_reduce(a)
        works = [dist.all_reduce(b, async_op=True)]
    works[0].wait()
    if first:
        dist.broadcast(a + 1, 0)
        dist.barrier()
        dist.scatter(a, [b] * dist.get_world_size(), src=0)
    else:
        dist.broadcast(b, 0)
        dist.barrier(group=dist.group.WORLD)
        dist.scatter(torch.zeros(4), src=0)
    mine = a if first else b
    dist.all_reduce(mine)
    if first:
        add(torch.zeros(2))
    else:
        add(b[:2])
"""


@functools.cache
def ranks(body: str, size: int) -> list[Rank]:
    program = PROLOGUE.replace("warned = []", f"def run():{body}\nwarned = []")
    return [rank.check() for rank in run_ranks(program, size)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_calls_on_different_lines_are_allowed(size):
    for rank in ranks(FINE, size):
        assert rank.result == ("", "", [])


@pytest.mark.timeout(120)
def test_swapped_calls_are_reported_in_a_notebook(notebook: Notebook) -> None:
    cell = """%%distribute mirrored
def step():
    context = distnb.get_replica_context()
    if context.replica_id_in_sync_group == 0:
        SWAP
    else:
        context.all_reduce("sum", b)
        context.all_reduce("sum", a)
strategy.run(step)
"""
    notebook.run("import torch, distnb\na, b = torch.ones(3), torch.zeros(3)")
    one = 'context.all_reduce("sum", a)'
    other = 'context.all_reduce("sum", b)'
    ran = notebook.try_run(cell.replace("SWAP", f"{one}\n        {other}"))
    assert ran.error_name == "CollectiveMismatchError", ran
    assert any(f"line {number}" in ran.error_text for number in (5, 6, 8, 9))  # for either replica
    ran = notebook.run(cell.replace("SWAP", f"{one}\n        {one}")).check()
    assert ran.stderr.count("UserWarning") == 1
    assert "line 5 on replica 0" in ran.stderr
    assert "line 8 on replica 1" in ran.stderr
    ran = notebook.run(cell.replace("SWAP", f"{other}\n        {one}")).check()
    assert not ran.stderr
