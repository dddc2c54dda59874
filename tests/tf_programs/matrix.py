"""The strategy matrix: each program of `programs/`, run as a script under each strategy that its document names.

A program is a file that uses the name `strategy`, as a `%%distribute` cell does, and leaves in `result` what must be
equal under every strategy: JSON, compared with the default strategy's. What its document says about a certain number
of replicas it asserts itself. It runs under ALL unless it says `UNDER = (...)`, and in a folder of its own, which its
replicas share. Adding a program is adding that file.

A program runs in the reference's way, in one more way, which differs from program to program, and with two mirrored
replicas in a notebook (`test_cells.py`). `make soak` runs the rest. The conformance suite has programs for each part of a strategy under each of them.
"""

from __future__ import annotations

import ast
import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.chips import CHIPS
from tests.support.ranks import run_ranks
from tests.support.tasks import Tasks

PROGRAMS = Path(__file__).parent / "programs"
REFERENCE = "default"
TIME_LIMIT_S = 150.0


@dataclass(frozen=True)
class Way:
    """A way to run a program: how to make the strategy, with how many processes and which environment.

    Attributes:
        workers: Each process has a TF_CONFIG, as a machine of its own.
    """

    made: str
    replicas: int = 1
    workers: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


WAYS = {
    "default": Way("distnb.get_strategy()"),
    "one_device": Way("distnb.OneDeviceStrategy('cpu:0')"),
    "mirrored_2": Way("distnb.MirroredStrategy()", 2),
    "mirrored_3": Way("distnb.MirroredStrategy()", 3),
    "mirrored_4": Way("distnb.MirroredStrategy()", 4),
    "central_2": Way("distnb.CentralStorageStrategy()", 2),
    "multi_worker_2": Way("distnb.MultiWorkerMirroredStrategy()", 2, workers=True),
    "tpu_2": Way("distnb.TPUStrategy()", 2, env=CHIPS),
}
# tpu_2 is the fake device of `tests/fake_tpu`, which is written in Python: programs of many steps leave it out.
ALL = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2", "tpu_2")

# Starting Python and loading torch costs more than a program: those of one strategy share their processes.
_DRIVER = """
import json, os, runpy, traceback
import torch
import distnb

strategy = {made}
ended = {{}}
for name in {names}:
    here = os.path.join({folder!r}, name)
    os.makedirs(here, exist_ok=True)
    os.chdir(here)
    torch.manual_seed(0)
    try:
        ended[name] = {{"result": runpy.run_path(os.path.join({programs!r}, name + ".py"), {{"strategy": strategy}})["result"]}}
    except Exception:
        ended[name] = {{"error": traceback.format_exc()}}
result = json.loads(json.dumps(ended))
"""


def cases() -> list[Any]:
    """Return every (program, way), grouped by way, with the mark `soak` where others test the same."""
    under = {path.stem: ways_of(path) for path in sorted(PROGRAMS.glob("*.py"))}
    by_default = {}
    for number, program in enumerate(under):
        others = [way for way in under[program] if way != REFERENCE]
        by_default[program] = {REFERENCE, others[number % len(others)]}
    return [
        pytest.param(program, way, marks=[] if way in by_default[program] else pytest.mark.soak)
        for way in WAYS
        for program, ways in under.items()
        if way in ways
    ]


def ways_of(program: Path) -> tuple[str, ...]:
    """Return the ways in the program's UNDER, or ALL without it."""
    for statement in ast.parse(program.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "UNDER":
            ways = tuple(ast.literal_eval(statement.value))
            assert set(ways) <= set(WAYS), f"{program}: UNDER names {ways}, and there are {', '.join(WAYS)}"
            return ways
    return ALL


def launcher(selected: Iterable[tuple[str, str]], folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function from a way to each process's outcome: {program: {"result": …} or {"error": …}}.

    Args:
        selected: The (program, way) pairs that shall run; the reference runs what any of them needs.
        folder: Where the programs may write.
    """
    pairs = list(selected)

    @functools.cache
    def launch(way: str) -> list[dict[str, Any]]:
        names = list(dict.fromkeys(program for program, under in pairs if way in (under, REFERENCE)))
        made = WAYS[way]
        # A launch that raises is repeated by the next test, which must not find the files of this one.
        here = tempfile.mkdtemp(prefix=f"{way}-", dir=folder)
        text = _DRIVER.format(made=made.made, names=names, folder=here, programs=str(PROGRAMS))
        if not made.workers:
            return [
                rank.check().result for rank in run_ranks(text, made.replicas, timeout_s=TIME_LIMIT_S, env=made.env)
            ]
        workers = [f"worker {index}" for index in range(made.replicas)]
        with Tasks(text + "report(ended=result)\n", workers) as tasks:
            return [task.check().reported["ended"] for task in tasks.wait(TIME_LIMIT_S)]

    return launch
