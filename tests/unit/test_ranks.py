"""The tests' own tools: a limit that strikes must show what hangs, and a leak must be seen."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.ranks import run_ranks


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


def test_a_failing_rank_is_reported_with_its_own_error():
    ranks = run_ranks("if os.environ['RANK'] == '1': raise ValueError('mine')", 2)
    ranks[0].check()
    with pytest.raises(AssertionError, match="ValueError: mine"):
        ranks[1].check()


def test_a_hanging_rank_is_killed_and_its_stack_shown():
    program = """
    import time
    def stuck_here():
        time.sleep(600)
    if os.environ["RANK"] == "1":
        stuck_here()
    """
    with pytest.raises(AssertionError, match=r"1 of 2 ranks not done in 20 s(.|\n)*stuck_here"):
        run_ranks(program, 2, timeout_s=20)


ORPHAN = (
    "import subprocess; "
    "print(subprocess.Popen(['sleep', '600'], stdin=-3, stdout=-3, stderr=-3, start_new_session=True).pid)"
)


def test_an_orphan_is_seen():
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=30, check=True)
    pid = int(done.stdout)
    with processes.killed_at_end(lambda: [pid]):
        assert pid in processes.children_of_this_run()
    processes.ends(pid, timeout_s=10)
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

@pytest.mark.timeout(1)
def test_hang():
    the_name_to_find_in_the_stack = time.sleep
    the_name_to_find_in_the_stack(600)

def test_clean():  # its module is clean, too, after this
    kept.pop().close()
    pathlib.Path(tempfile.gettempdir(), "forgotten").unlink()
"""


def test_leaks_and_hangs_of_a_test_are_found(tmp_path):
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    root = Path(__file__).parents[2]
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
    for told in ("sleep 600", "listening port 127.0.0.1:", "forgotten", "test_hang (test_leaky.py"):
        assert told in done.stdout, done.stdout
