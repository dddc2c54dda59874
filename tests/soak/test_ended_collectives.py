"""Hundreds of interrupts and errors during traffic: the cell ends in any wait, and the next one works."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.support.collective_traffic import STEPS, preparation
from tests.support.kernel import Notebook, Ran

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(2400)]

_ROUNDS = 5  # of each step: more than 200 interrupts, and as many errors
_LIMIT_S = 60.0
_NEW_AFTER = 50  # rounds: a collective that Gloo forgets keeps its threads, and hundreds of them slow other tests down
_NEXT = """%%distribute mirrored
import torch, torch.distributed as dist
total = torch.ones(3)
dist.all_reduce(total)
print("sum:", int(total.sum()))
"""


def _cell(step: str, count: int, stop: str = "") -> str:
    return (
        f"%%distribute mirrored\n{preparation(step, count)}\n{step}\ndist.barrier()\nprint('ready', flush=True)\n"
        f"for number in range(10**9):\n{stop}    {step}\n"
    )


def _interrupted(notebook: Notebook, chance: random.Random, step: str) -> Ran:
    source = _cell(step, chance.choice([10, 20_000]))
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready", timeout_s=_LIMIT_S)
    time.sleep(chance.uniform(0.0, 0.3))
    notebook.interrupt()
    return notebook.finish(message, source, timeout_s=_LIMIT_S)


def _failed(notebook: Notebook, chance: random.Random, step: str) -> Ran:
    who, when = chance.randrange(notebook.engines), chance.randrange(40)
    stop = f"    if rank == {who} and number == {when}:\n        raise ValueError('mine')\n"
    return notebook.try_run(_cell(step, chance.choice([10, 20_000]), stop), timeout_s=_LIMIT_S)


_ENDS: dict[str, Callable[[Notebook, random.Random, str], Ran]] = {
    "KeyboardInterrupt": _interrupted,
    "ValueError": _failed,
}


def _stuck(notebook: Notebook) -> bool:
    """Return whether a replica runs on for long. On a slow machine one may end later than the notebook waits."""
    until = time.monotonic() + _LIMIT_S
    while "busy" in notebook.run("%distnb status").text:
        if time.monotonic() > until:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("engines", [2, 4])
def test_no_replica_hangs_in_an_ended_collective(engines: int) -> None:
    chance = random.Random(engines)
    wrong: list[str] = []
    rounds = [(step, error) for step in STEPS for error in _ENDS] * _ROUNDS
    with Notebook(engines) as notebook:
        notebook.run("import torch\ntorch.set_num_threads(1)")
        for number, (name, error) in enumerate(rounds, 1):
            if number % _NEW_AFTER == 0:
                notebook.run("%distnb restart", timeout_s=90)
            ran = _ENDS[error](notebook, chance, STEPS[name])
            if ran.error_name != error:
                wrong.append(f"{name}: {error} expected, got {ran.error_name}: {ran.error_text}")
            if _stuck(notebook):
                wrong.append(f"{name} ({error}): {ran.traceback}")
                notebook.run("%distnb restart", timeout_s=90)
            after = notebook.try_run(_NEXT, timeout_s=_LIMIT_S)
            if f"sum: {3 * engines}\n" not in after.stdout:
                wrong.append(f"after {name} ({error}): {after.error_name}: {after.error_text} {after.stdout}")
    assert not wrong, f"{len(wrong)} of {len(rounds)}:\n" + "\n".join(wrong)
