"""Hundreds of errors that one replica catches: each ends the cell on all replicas with that error, and the next works."""

from __future__ import annotations

import os
import random

import pytest

from tests.support.sessions import run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(2400)]

_ROUNDS = int(os.environ.get("DISTNB_TEST_ROUNDS", 300))
_CELL = """
import random, time
import torch, distnb
import torch.distributed as dist

chance = random.Random({seed} * 100 + distnb.replica_id())

def f():
    for number in range({before}):
        dist.all_reduce(torch.ones({count}))
    time.sleep(chance.choice([0.0, 0.0, 0.003, 0.05]))
    if distnb.replica_id() == {who}:
        raise KeyError("mine")
    dist.all_reduce(torch.ones({count}))

try:
    strategy.run(f)
except Exception as error:
    time.sleep(chance.choice([0.0, 0.0, 0.003, 0.05, 0.2]))
{after}
"""
_AFTER = {
    "ends": "",
    "goes on": "dist.all_reduce(torch.ones({count}))",
    "goes on with something else": "dist.barrier()",
    "does it again": "for again in range(3):\n    try:\n        strategy.run(f)\n    except Exception:\n        pass",
    "does it again for ever": "while True:\n    try:\n        strategy.run(f)\n    except Exception:\n        pass",
    "computes for ever": "while True:\n    time.sleep(0.001)",
}


@pytest.mark.parametrize("engines", [2, 4])
def test_each_caught_error_ends_the_cell_and_is_reported_first(engines: int) -> None:
    chance, wrong = random.Random(engines), []
    with started(engines) as session:
        for seed in range(_ROUNDS):
            name = chance.choice(list(_AFTER))
            count = chance.choice([3, 3_000_000])
            values = {"seed": seed, "who": chance.randrange(engines), "before": chance.randrange(3), "count": count}
            source = _CELL.format(after=_AFTER[name].format(count=count), **values)
            try:
                run_cell(session, source, f"<cell {seed}>")
            except KeyError as error:
                if "although the program went on after it" not in "\n".join(error.__notes__):
                    wrong.append(f"{seed} {name} {values}: {error.__notes__}")
            except Exception as error:
                wrong.append(f"{seed} {name} {values}: {type(error).__name__}: {error}")
            else:
                wrong.append(f"{seed} {name} {values}: no error")
            run_cell(
                session, "import torch.distributed as dist\ntotal = torch.ones(1)\ndist.all_reduce(total)", "<sum>"
            )
            if session.user_ns["total"].item() != engines:
                wrong.append(f"{seed} {name} {values}: a sum of {session.user_ns['total']}")
    assert not wrong, "\n".join([f"{len(wrong)} of {_ROUNDS}", *wrong])
