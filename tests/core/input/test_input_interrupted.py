"""Workers of a cell that ended half-way, none of which reads on, even if a name still holds the iteration."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.kernel import Notebook, lines_of_each

LIMIT_S = 60.0
pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

SETUP = """
import time, torch, distnb

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index >= 8:
            time.sleep(STUCK_S)
        return torch.tensor(index)
STUCK_S = 600.0
"""
READING = """%%distribute mirrored
loader = torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=1, persistent_workers={persistent})
dataset = strategy.distribute_dataset(loader)
kept = iter(dataset)
first = next(kept)
print("ready", flush=True)
{then}
"""


@pytest.fixture(scope="module", autouse=True)
def _names(notebook: Notebook) -> None:
    notebook.run(SETUP)


def workers(notebook: Notebook, before: set[int]) -> list[str]:
    new = [processes.describe(p) for pid, p in notebook.processes().items() if pid not in before]
    return [line for line in new if "distnb.engine" in line]


def is_dead(pid: int) -> bool:
    """Return whether all threads of a process have ended: only then does its parent get SIGCHLD."""
    return ") Z " in Path(f"/proc/{pid}/stat").read_text() and len(os.listdir(f"/proc/{pid}/task")) == 1


@pytest.mark.parametrize(
    ("ended_by", "persistent"),
    [
        ("interrupt", True),
        ("another replica's error", False),
        pytest.param("interrupt", False, marks=pytest.mark.soak),
        pytest.param("another replica's error", True, marks=pytest.mark.soak),
    ],
)
def test_no_worker_continues_to_read(notebook: Notebook, ended_by: str, persistent: bool) -> None:
    before = set(notebook.processes())
    wait = "for batch in kept:\n    pass"
    if ended_by == "interrupt":
        source = READING.format(persistent=persistent, then=wait)
        message = notebook.start(source)
        notebook.wait_for_output(message, "ready", timeout_s=LIMIT_S)
        notebook.interrupt()
        assert notebook.finish(message, source, timeout_s=LIMIT_S).error_name == "KeyboardInterrupt"
    else:
        source = READING.format(persistent=persistent, then=f"if distnb.is_chief():\n    1 / 0\n{wait}")
        assert notebook.try_run(source, timeout_s=LIMIT_S).error_name == "ZeroDivisionError"
    processes.wait_until(lambda: not workers(notebook, before), LIMIT_S, "DataLoader workers are still there")
    ran = notebook.try_run("%%distribute mirrored\nnext(kept)", timeout_s=LIMIT_S)
    assert ran.error_name == "ProgramError"
    assert "iterate over the dataset again" in ran.error_text
    ran = notebook.run("%%distribute mirrored\nagain = iter(dataset)\nnext(again)\nprint('again')\nagain.close()")
    assert "again" in ran.stdout


def test_interrupted_workers_are_not_waited_for(notebook: Notebook, tmp_path: Path) -> None:
    """Interrupt workers as Ctrl-C in a terminal does. Torch would wait five seconds for each that ignores it."""
    notebook.run(f"""
import os

class Interrupted(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        mark = os.path.join({str(tmp_path)!r}, str(os.getpid()))
        try:
            open(mark + " begins", "w").close()  # from here on the interrupt may come
            time.sleep(600)
        except KeyboardInterrupt:
            open(mark + " interrupted", "w").close()
            raise
""")
    source = "%%distribute mirrored\nfor batch in torch.utils.data.DataLoader(Interrupted(), num_workers=1):\n    pass"
    message = notebook.start(source)
    processes.wait_until(lambda: len(list(tmp_path.glob("* begins"))) == 2, LIMIT_S, "the workers do not begin")
    notebook.interrupt()
    assert notebook.finish(message, source, timeout_s=LIMIT_S).error_name == "KeyboardInterrupt"
    processes.wait_until(
        lambda: len(list(tmp_path.glob("* interrupted"))) == 2, LIMIT_S, "the workers were not interrupted"
    )


def test_a_worker_killed_between_cells_ends_no_engine(notebook: Notebook) -> None:
    """Kill a worker between programs, when torch's SIGCHLD handler would raise in the engine's own code."""
    notebook.run(
        """%%distribute mirrored
import os
loader = torch.utils.data.DataLoader(range(64), num_workers=1, persistent_workers=True)
next(iter(loader))
worker = loader._iterator._workers[0].pid
engine = os.getpid()
"""
    )
    for pid in notebook.value("dict(enumerate(worker.values))").values():
        os.kill(pid, signal.SIGKILL)
        processes.wait_until(lambda pid=pid: is_dead(pid), LIMIT_S, "the worker is still there")
    for _ in range(2):
        ran = notebook.run("%%distribute mirrored\nprint(os.getpid() == engine, strategy.num_replicas_in_sync)")
        assert lines_of_each(ran.stdout) == [["True 2"], ["True 2"]]
    ran = notebook.try_run("%%distribute mirrored\nfor batch in loader:\n    pass", timeout_s=LIMIT_S)
    assert ran.error_name == "RuntimeError"
    assert "exited unexpectedly" in ran.traceback
