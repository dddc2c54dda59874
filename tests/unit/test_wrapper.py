"""What stands before a program that starts node agents: it tells how they ended, and when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import wait_until

WRAPPER = [sys.executable, "-P", "-m", "distnb.cluster.remote.wrapper"]
PROGRAM = """
import sys
from distnb.cluster.remote import wrapper
wrapper._LEAVING_S = float(sys.argv[1])
sys.exit(wrapper.main(sys.argv[2:]))
"""


def leaving(within_s: float) -> list[str]:
    """A wrapper that gives its command so long to end by itself."""
    return [sys.executable, "-c", PROGRAM, str(within_s)]


def _wrapped(script: str, told: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WRAPPER, "sh", "-c", script], input=told, capture_output=True, text=True, timeout=60)


def test_a_node_agents_words_go_on_and_its_status_is_told() -> None:
    done = _wrapped(
        'echo distnb-beat; echo 3; read line; echo "$line" >&2; echo distnb-status 137; exit 1', "an assignment\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("3\n", "an assignment\n", 137)


def test_an_end_of_which_no_node_agent_told_is_a_lost_machine() -> None:
    done = _wrapped("echo srun: error: no such node >&2; exit 1")
    assert (done.stderr, done.returncode) == ("srun: error: no such node\n", 255)
    done = subprocess.run([*WRAPPER, "no-such-program"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 255
    assert "no-such-program cannot be started" in done.stderr


def test_being_killed_with_its_group_leaves_nothing() -> None:
    # Neither what is in a session of its own nor an orphan there: conftest looks.
    script = "setsid sleep 600 & (setsid sleep 600 &); echo up; wait"
    command = [*leaving(0), "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"up\n"
        os.killpg(started.pid, signal.SIGKILL)
        assert started.wait(60) == -signal.SIGKILL
        assert started.stdout.read() == b"", "all that held it have ended"


def test_silence_is_a_lost_machine_too() -> None:
    # What it has started is ended with it: conftest looks.
    program = (
        "import sys; from distnb.cluster.remote.wrapper import main; sys.exit(main(['sh', '-c', sys.argv[1]], {}, {}))"
    )
    for script, silence_s, first_word_s in (("echo distnb-beat; setsid sleep 600", 0.3, 60), ("sleep 600", 60, 0.3)):
        command = [sys.executable, "-c", program.format(silence_s, first_word_s), script]
        assert subprocess.run(command, timeout=60).returncode == 255


def test_a_node_agent_whose_notebook_is_gone_has_time_to_clean_up(tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"
    command = [*leaving(60), "sh", "-c", f"echo up; cat; sleep 0.5; touch {cleaned}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        assert started.stdout.readline() == b"up\n"
        started.stdin.close()
        os.killpg(started.pid, signal.SIGKILL)
        wait_until(cleaned.exists, 60)


def test_being_ended() -> None:
    command = [*leaving(0), "sh", "-c", "sleep 600 & echo up; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"up\n"
        started.terminate()
        assert started.wait(60) == 255
