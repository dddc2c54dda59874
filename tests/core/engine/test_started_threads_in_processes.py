"""Threads and asyncio tasks that a cell or a call starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import processes
from tests.support.kernel import Notebook

pytestmark = pytest.mark.processes

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


TASKS = """%%distribute mirrored
import asyncio, os, time
async def fetch(number):
    await asyncio.sleep(0.05)
    return number * 10
async def hold(lock):
    async with lock:
        await asyncio.sleep(0.05)
async def block(folder):
    open(os.path.join(folder, f"begun{distnb.replica_id()}"), "w").close()
    time.sleep(600)
"""


def test_tasks_are_awaited_in_any_line_of_their_cell_and_in_later_cells(notebook: Notebook) -> None:
    notebook.run(TASKS)
    ran = notebook.run("%%distribute mirrored\ntask = asyncio.create_task(fetch(4))\nawait task")
    assert ran.stdout + ran.stderr == "[0-1] 40\n"
    tasks = "tasks = [asyncio.create_task(fetch(number)) for number in range(3)]"
    assert notebook.run(f"%%distribute mirrored\n{tasks}\nawait asyncio.gather(*tasks)").stdout == "[0-1] [0, 10, 20]\n"
    lock = "lock = asyncio.Lock()\ntask = asyncio.create_task(hold(lock))\nawait asyncio.sleep(0.01)"
    assert notebook.run(f"%%distribute mirrored\n{lock}\nawait lock.acquire()").stdout == "[0-1] True\n"
    ran = notebook.run("%%distribute mirrored\ntasks = [asyncio.create_task(fetch(number)) for number in range(3)]")
    assert "[0-1] distnb: 3 asyncio tasks of this cell have not finished." in ran.stderr
    notebook.run("%%distribute mirrored\nfound = [await task for task in tasks]")
    assert notebook.value("found") == [0, 10, 20]


def test_a_task_that_blocks_is_stopped_and_holds_up_only_the_cell_that_runs_it(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.run(TASKS)
    notebook.run(f"def begin():\n    asyncio.get_running_loop().create_task(block({str(tmp_path)!r}))")
    notebook.run("import distnb\ndistnb.MirroredStrategy().run(begin)")
    notebook.run("%%distribute mirrored\nnumber = 5")
    assert notebook.value("number") == 5
    source = "%%distribute mirrored\nawait asyncio.sleep(600)"
    message = notebook.start(source)
    processes.wait_until(lambda: len(list(tmp_path.iterdir())) == 2, LIMIT_S)  # the task runs first
    notebook.interrupt()
    assert notebook.finish(message, source, timeout_s=LIMIT_S).error_name == "KeyboardInterrupt"
    notebook.run("%%distribute mirrored\nawait asyncio.sleep(0.01)")


def test_handlers_run_in_an_await_that_is_stopped(notebook: Notebook) -> None:
    source = """%%distribute mirrored
import asyncio
seen = []
try:
    print("ready", flush=True)
    await asyncio.sleep(600)
except asyncio.CancelledError:
    seen.append("cancelled")
    raise
finally:
    await asyncio.sleep(0.1)
    seen.append("whole")
"""
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready")
    notebook.interrupt()
    assert notebook.finish(message, source, timeout_s=LIMIT_S).error_name == "KeyboardInterrupt"
    assert notebook.value("seen") == ["cancelled", "whole"]
