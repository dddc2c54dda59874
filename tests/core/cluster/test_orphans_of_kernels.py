"""A real kernel with a cluster, ended in every way in which kernels end: all its processes end with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.support import processes
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150), pytest.mark.usefixtures("real_processes")]

_WITHIN_S = 10.0
_WORKERS = """\
%%distribute mirrored
from torch.utils.data import DataLoader
batches = iter(DataLoader(list(range(1000)), num_workers=2))
first = next(batches)
"""


def kill(notebook: Notebook) -> None:
    os.kill(notebook.pid, signal.SIGKILL)


def close(notebook: Notebook) -> None:
    notebook.close()


def restart(notebook: Notebook) -> None:
    notebook._manager.restart_kernel(now=False)


def restart_now(notebook: Notebook) -> None:
    notebook._manager.restart_kernel(now=True)


@pytest.mark.parametrize(
    ("end", "busy"),
    [
        (kill, True),
        (restart, True),
        # Jupyter's `now` is a kill.
        *(pytest.param(end, False, marks=pytest.mark.soak) for end in (close, kill, restart, restart_now)),
        *(pytest.param(end, True, marks=pytest.mark.soak) for end in (close, restart_now)),
    ],
)
def test_no_process_outlives_a_kernel(end: Callable[[Notebook], None], busy: bool) -> None:
    before = processes.run_directories()
    notebook = Notebook(engines=2).__enter__()
    try:
        notebook.run(_WORKERS)
        if busy:
            message = notebook.start("%%distribute mirrored\nprint('busy', flush=True)\nwhile True: pass")
            notebook.wait_for_output(message, "busy")
        started = set(processes.children_of_this_run()) - {notebook.pid}
        directories = [*processes.run_directories() - before]
        assert len(started) >= 2 + 4 + 1  # engines, workers, controller
        assert len(directories) == 1
        end(notebook)
        processes.wait_until(
            lambda: not started & set(processes.children_of_this_run()), _WITHIN_S, "processes are left"
        )
        processes.wait_until(lambda: not directories[0].exists(), _WITHIN_S, f"{directories[0]} is left")
    finally:
        if end is not close:
            notebook.close()
