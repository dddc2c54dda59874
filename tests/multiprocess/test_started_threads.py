"""Threads that a cell or a call starts belong to it, even if they communicate."""

from __future__ import annotations

from pathlib import Path

from tests import processes
from tests.kernel import Notebook

LIMIT_S = 45.0


def test_a_cell_ends_after_its_threads(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""%%distribute mirrored
import threading, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from concurrent.futures import ThreadPoolExecutor

dcp.async_save({{"w": torch.ones(3)}}, checkpoint_id={str(tmp_path / "saved")!r})
pool = ThreadPoolExecutor(1)
pool.submit(print, "in a pool")
""")
    assert (tmp_path / "saved" / ".metadata").exists()
    notebook.run("""%%distribute mirrored
total = torch.ones(1)
def add():
    time.sleep(0.1)
    dist.all_reduce(total)
_ = pool.submit(add)
""")
    assert notebook.value("float(total)") == 2.0
    notebook.run("""
import distnb, threading, time, torch
def begin():
    result = torch.zeros(1)
    def late():
        time.sleep(0.1)
        result.add_(1)
    threading.Thread(target=late).start()
    return result
found = distnb.MirroredStrategy().run(begin)
""")
    assert notebook.value("float(distnb.MirroredStrategy().reduce('sum', found, axis=None))") == 2.0


def test_stop_ends_the_wait_for_a_thread_and_names_it(notebook: Notebook, tmp_path: Path) -> None:
    end = tmp_path / "end"
    source = f"""%%distribute mirrored
import os, threading, time
def endless():
    while not os.path.exists({str(end)!r}):
        time.sleep(0.01)
threading.Thread(target=endless, name="monitor").start()
"""
    message = notebook.start(source)
    for kind, content in notebook.events(message, LIMIT_S):
        if kind == "stream" and "monitor" in content["text"]:
            assert "(cell " in content["text"]
            break
    notebook.interrupt()
    assert notebook.finish(message, source, timeout_s=LIMIT_S).error_name == "KeyboardInterrupt"
    processes.wait_until(lambda: "busy" not in notebook.run("%distnb status").text, LIMIT_S)
    notebook.run("%%distribute mirrored\nprint('next')")  # the wait is not repeated
    end.touch()
