"""`distnb run` with real processes: scripts on two replicas of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script: (text, words before the script, words after it)."""

    def go(text: str, before: str = "-n 2", after: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(text)
        words = [sys.executable, "-m", "distnb", "run", *before.split(), "script.py", *after.split()]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)

    return go


def test_a_script_for_torchrun_runs_on_loopback(run: Run) -> None:
    done = run(
        """
import os, sys, psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
print(x.tolist(), sys.argv, [os.environ[name] for name in names], sorted(listening), __name__, __file__)
print("to stderr", file=sys.stderr)
dist.destroy_process_group()
""",
        after="--lr 0.1",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] [3.0, 3.0, 3.0] ['script.py', '--lr', '0.1'] ['{rank}', '2', '{rank}', '2', '127.0.0.1'] "
        "['127.0.0.1'] __main__ script.py"
        for rank in range(2)
    ]
    assert sorted(done.stderr.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_the_failing_replicas_traceback_is_shown_last_and_the_others_end(run: Run) -> None:
    done = run(
        """
import os, time
def step():
    raise ValueError("boom")
if os.environ["RANK"] == "1":
    step()
time.sleep(1000)
"""
    )
    assert done.returncode == 1
    report = done.stderr.partition("distnb run: ")[2]
    # On a busy machine its error is known long before its end.
    begins = r"replica 1 of 2 (exited with code 1|failed)\. The other replica was ended\.\nIts traceback:\n\n"
    assert re.match(begins, report), report
    assert report.endswith("ValueError: boom\n")
    assert 'File "script.py", line 6, in <module>' in report
    assert "runpy" not in report
    assert "distnb/cluster" not in report
    assert "[1] ValueError: boom" in done.stderr


def test_the_first_error_is_reported_rather_than_its_consequences(run: Run) -> None:
    done = run(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise KeyError("the cause")
dist.all_reduce(torch.ones(3))
"""
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'the cause'")


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("sys.exit(7)", 7, "replica 1 of 2 exited with code 7"),
        ("os.kill(os.getpid(), 9)", 137, "replica 1 of 2 was killed by SIGKILL"),
        pytest.param("sys.exit('sorry')", 1, "replica 1 of 2 exited with code 1", marks=pytest.mark.soak),
        pytest.param("os.abort()", 134, "replica 1 of 2 was killed by SIGABRT", marks=pytest.mark.soak),
        pytest.param("os._exit(3)", 3, "replica 1 of 2 exited with code 3", marks=pytest.mark.soak),
    ],
)
def test_the_exit_code_is_the_failing_replicas(run: Run, ending: str, code: int, text: str) -> None:
    done = run(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\ntime.sleep(1000)\n")
    assert done.returncode == code
    assert text in done.stderr


def test_a_replica_that_cannot_exit_after_its_error_does_not_delay_the_others(run: Run) -> None:
    done = run(
        """
import os, threading, time
if os.environ["RANK"] == "0":
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise RuntimeError("stuck at exit")
time.sleep(1000)
"""
    )
    assert done.returncode == 1
    assert "replica 0 of 2 failed. The other replica was ended." in done.stderr


def test_lines_remain_whole_and_progress_bars_move_until_the_last_replica_ends(run: Run) -> None:
    done = run(
        """
import os, sys, time
for i in range(300):
    print("x" * 2000)
if os.environ["RANK"] == "0":
    sys.stderr.write("\\r 10%\\r 20%\\n")
time.sleep(int(os.environ["RANK"]))
print("done")
"""
    )
    assert done.returncode == 0
    lines = [f"[{rank}] {line}" for rank in range(2) for line in ["x" * 2000] * 300 + ["done"]]
    assert sorted(done.stdout.splitlines()) == sorted(lines)  # the order is not guaranteed
    assert done.stderr.replace("\n", "\r").split("\r")[:2] == ["[0]  10%", "[0]  20%"]


def test_a_single_replica_is_unmarked_and_finds_the_files_next_to_its_script(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runpy.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "data.py").write_text("VALUE = 3\n")
    done = run("from data import VALUE\nprint(VALUE, end='')\n1 / 0\n", before="-n 1")
    assert done.returncode == 1
    assert done.stdout == "3\n"
    assert done.stderr.count("ZeroDivisionError") == 1


def test_a_module_can_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (tmp_path / "package" / "train.py").write_text("from package.neighbour import NAME\nprint(NAME, __name__)\n")
    words = [sys.executable, "-m", "distnb", "run", "-n", "1", "-m", "package.train"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.stdout == "neighbour __main__\n", done.stderr


def test_a_closed_output_pipe_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("while True:\n    print('again')\n")
    words = [sys.executable, "-m", "distnb", "run", "-n", "2", "script.py"]
    launcher = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert launcher.stdout is not None
    with launcher.stdout:
        assert re.match(r"\[[01]\] again", launcher.stdout.readline())
    assert launcher.wait(60) == 128 + signal.SIGPIPE
    assert not processes.children_of_this_run()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.soak)],
)
def test_ctrl_c_and_sigterm_reach_every_replica(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('waiting', flush=True)\n"
        "time.sleep(1000) if dist.get_rank() else dist.all_reduce(torch.ones(1))\n"
    )
    words = [sys.executable, "-m", "distnb", "run", "-n", "2", "script.py"]
    launcher = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] waiting\n", "[1] waiting\n"]
    os.kill(launcher.pid, number)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert "Traceback" not in errors
    assert not processes.children_of_this_run()
