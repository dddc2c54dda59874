"""The tests' own tools: an expired limit shows what hangs, and a leak is seen."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import processes, ranks, warm_python
from tests.support.ranks import run_ranks
from tests.support.warm_python import Forked

pytestmark = pytest.mark.processes


def test_ranks_meet_and_return_values():
    program = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    result = total.item()
    dist.destroy_process_group()
    """
    assert [rank.check().result for rank in run_ranks(program, 2)] == [3.0, 3.0]


def test_ranks_are_like_processes_that_have_just_started():
    program = """
    import atexit, numpy, random, threading
    result = {
        "own": (hash("text"), random.random(), numpy.random.random(), torch.initial_seed(), os.getpid()),
        "common": (os.getsid(0) == os.getpid(), __name__, sys.argv == [__file__], "tests" in sys.path[0]),
        "threads": (torch.get_num_threads(), [each.name for each in threading.enumerate()]),
    }
    atexit.register(print, "the end")
    """
    first, second, third = (rank.check() for rank in run_ranks(program, 3))
    assert not set(first.result["own"][1:]) & set(third.result["own"][1:]), "forked from one process"
    assert not set(first.result["own"][1:]) & set(second.result["own"][1:])
    assert (first.result["own"][0] == second.result["own"][0]) == (warm_python.hash_seeds == 1)
    assert first.result["common"] == second.result["common"] == (True, "__main__", True, False)
    assert first.result["threads"] == second.result["threads"] == (1, ["MainThread"])
    assert first.stdout == second.stdout == "the end\n"


def test_a_failing_rank_is_reported_with_its_own_error():
    good, bad = run_ranks("if os.environ['RANK'] == '1': raise ValueError('mine')", 2)
    good.check()
    with pytest.raises(AssertionError, match="ValueError: mine"):
        bad.check()


def test_a_hanging_rank_is_killed_and_its_stack_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = f"""
    import pathlib, time
    here = pathlib.Path({str(tmp_path)!r}, os.environ["RANK"])
    def stuck_here():
        here.touch()
        time.sleep(600)
    if os.environ["RANK"] == "1":
        stuck_here()
    """

    started: list[Forked] = []
    start = ranks._start

    def start_and_keep(*args: Any) -> Forked:
        started.append(start(*args))
        return started[-1]

    def clock() -> float:
        """Return a clock whose limit expires once one thread has ended and the other is stuck."""
        return 20.1 if (tmp_path / "1").exists() and started[0].poll() is not None else 0.0

    monkeypatch.setattr(ranks, "_start", start_and_keep)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with pytest.raises(AssertionError, match=r"1 of 2 ranks not done in 20 s(.|\n)*stuck_here"):
        run_ranks(program, 2, timeout_s=20)


ORPHAN = (
    "import subprocess; "
    "print(subprocess.Popen(['sleep', '600'], stdin=-3, stdout=-3, stderr=-3, start_new_session=True).pid)"
)


def test_an_orphan_is_detected():
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=True)
    pid = int(done.stdout)
    with processes.killed_at_end(lambda: [pid]):
        assert pid in processes.children_of_this_run()
    processes.ends(pid, timeout_s=60)
    assert pid not in processes.children_of_this_run()


LEAKY = f"""
import subprocess, sys, socket, tempfile, pathlib, time
import pytest

kept = []

def test_process():
    subprocess.run([sys.executable, "-c", {ORPHAN!r}], check=True)

def test_port():
    server = socket.create_server(("127.0.0.1", 0))
    kept.append(server)


def test_file():
    pathlib.Path(tempfile.gettempdir(), "forgotten").touch()

@pytest.mark.timeout(2, func_only=True)  # struck in its setup, it would have no stack to show
def test_hang():
    the_name_to_find_in_the_stack = time.sleep
    the_name_to_find_in_the_stack(600)

def test_clean():  # its module is clean, too, after this
    kept.pop().close()
    pathlib.Path(tempfile.gettempdir(), "forgotten").unlink()
"""


def test_leaks_and_hangs_of_a_test_are_detected(tmp_path):
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", root / "pyproject.toml", "-rA"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        cwd=root,
        env={**os.environ, "DISTNB_TEST_GONE_WITHIN_S": "0.2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    outcomes = re.findall(r"^(PASSED|ERROR|FAILED) .*::(\w+)", done.stdout, flags=re.MULTILINE)
    assert {("ERROR", "test_process"), ("ERROR", "test_port"), ("ERROR", "test_file")} <= set(outcomes), done.stdout
    assert ("FAILED", "test_hang") in outcomes, done.stdout
    assert ("ERROR", "test_clean") not in outcomes, done.stdout
    for text in ("sleep 600", "listening port 127.0.0.1:", "forgotten", "test_hang (test_leaky.py"):
        assert text in done.stdout, done.stdout
