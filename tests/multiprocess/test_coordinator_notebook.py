"""Closures that a notebook schedules: what they print is shown in the cell, and its stop button ends them."""

from __future__ import annotations

import pytest

from tests.kernel import Notebook

pytestmark = pytest.mark.timeout(120)

_SETUP = """
import os, time
import distnb
coordinator = distnb.coordinator.ClusterCoordinator(distnb.ParameterServerStrategy())
class Mine(Exception):
    pass
def step(n):
    print("step", n)
    if n < 0:
        raise Mine(n)
    return n
"""


def test_closures_in_a_notebook() -> None:
    with Notebook() as notebook:
        notebook.run("%distnb start --workers 2 --ps 1")
        notebook.run(_SETUP)
        ran = notebook.run("values = [coordinator.schedule(step, args=(n,)) for n in (1, 2)]\ncoordinator.join()")
        assert ran.stdout.count("step 1") == 1
        assert ran.stdout.count("step 2") == 1
        ran = notebook.try_run("coordinator.schedule(step, args=(-1,))\ncoordinator.join()")
        assert ran.error_name == "Mine"
        assert "raise Mine(n)" in ran.traceback
        assert "Cell In[3], line" in ran.traceback
        assert "orker" in ran.traceback
        notebook.run("values = [coordinator.schedule(time.sleep, args=(60,)) for _ in range(8)]")
        cell = notebook.start("print('waits', flush=True)\ncoordinator.join()")
        notebook.wait_for_output(cell, "waits")
        notebook.interrupt()
        assert notebook.finish(cell).error_name == "KeyboardInterrupt"
        notebook.run("coordinator.join()")  # the stop may have come before the cell joined
        assert notebook.value("[value.state for value in values]") == ["cancelled"] * 8
        notebook.run("coordinator.schedule(step, args=(3,)).fetch()")
