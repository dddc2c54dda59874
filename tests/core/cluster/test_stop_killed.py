"""A notebook killed while it stops its cluster leaves no process, no key and no file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from tests.support import processes
from tests.support.clusters import make_cluster

pytestmark = pytest.mark.processes

_WITHIN_S = 20.0
_WATCHED = ("/distnb/cluster/", "/shutil.py")


def notebook(moment: int) -> subprocess.Popen[str]:
    """Start a notebook that starts and stops a cluster, and is killed at the line of this number (0: never)."""
    command = [sys.executable, "-m", "tests.core.cluster.test_stop_killed", str(moment)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(120)
def test_a_stop_killed_at_any_moment_leaves_no_process() -> None:
    before = processes.run_directories()
    dry = notebook(0)
    lines = int(dry.communicate()[0])
    assert dry.returncode == 0
    moments = [lines // 3, lines * 9 // 10]
    for stopping in [notebook(moment) for moment in moments]:
        stopping.communicate()
        assert stopping.returncode == -signal.SIGKILL
    processes.wait_until(lambda: not processes.children_of_this_run(), _WITHIN_S, "processes are left")
    processes.wait_until(lambda: processes.run_directories() == before, _WITHIN_S, "files are left")


def main(moment: int) -> None:
    cluster = make_cluster(1)
    cluster.start()
    processes.wait_until(cluster.client_file.exists, _WITHIN_S)
    keys = json.loads(cluster.client_file.read_text()), (cluster.directory / "connection.json").stat().st_mode & 0o077
    assert keys[0]["curve_serverkey"]
    assert keys[1] == 0
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if not any(part in frame.f_code.co_filename for part in _WATCHED):
            return None
        if event == "line":
            lines += 1
            if lines == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    cluster.stop()
    sys.settrace(None)
    print(lines)


if __name__ == "__main__":
    main(int(sys.argv[1]))
