"""Runs of a program as the tasks of a cluster: one process each, with a TF_CONFIG of its own.

Example:
    >>> with Tasks("print(distnb.is_chief())", ["worker 0", "worker 1"]) as tasks:
    ...     assert [task.check().stdout for task in tasks.wait()] == ["True\\n", "False\\n"]
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import processes, warm_python
from tests.support.processes import wait_until
from tests.support.warm_python import Process

_PROLOGUE = """\
import ctypes, json, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
import torch
torch.set_num_threads(1)
import distnb
def report(**values):
    print(json.dumps(values), flush=True)
"""


@dataclass(frozen=True)
class Task:
    """The end of one task."""

    name: str
    returncode: int
    stdout: str
    stderr: str

    def check(self) -> Task:
        """Return itself if it ended well; otherwise raise an AssertionError with its output."""
        assert self.returncode == 0, f"{self.name} ended with {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self

    @property
    def reported(self) -> dict[str, Any]:
        """The values that the program passed to `report`, from all lines together."""
        values: dict[str, Any] = {}
        for line in self.stdout.splitlines():
            text = re.sub(r"^\[\d+\] ", "", line)
            if text.startswith("{"):
                values |= json.loads(text)
        return values


class Tasks:
    """The processes of one cluster on this machine.

    Args:
        program: The source text, dedented here. `torch`, `distnb`, `os` and `sys` are imported, and `report(**values)` is
            defined.
        names: The tasks, such as "worker 0", in any order. Evaluators are not in the cluster.
        cluster_for: A function that returns a task's TF_CONFIG cluster, from its name and the actual cluster.
        command: The command that runs the program. `SCRIPT` in it is replaced by its file.
        env: Variables to add to each task's environment.
    """

    def __init__(
        self,
        program: str,
        names: list[str],
        *,
        cluster_for: Callable[[str, dict[str, list[str]]], Any] = lambda name, cluster: cluster,
        command: Mapping[str, list[str]] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names
        self._cluster_for = cluster_for
        self._command = dict(command or {})
        self._env = dict(env or {})
        self._folder = tempfile.TemporaryDirectory(prefix="tasks-")
        self.folder = Path(self._folder.name)
        (self.folder / "program.py").write_text(_PROLOGUE + textwrap.dedent(program), encoding="utf-8")
        self._reserved: list[socket.socket] = []
        self.cluster = self._addresses()
        self.processes: dict[str, Process] = {}

    def _addresses(self) -> dict[str, list[str]]:
        """Return free ports, held by bound sockets. Those that listen later can bind them, too (SO_REUSEADDR)."""
        cluster: dict[str, list[str]] = {}
        for name in sorted(name for name in self.names if not name.startswith("evaluator")):
            reserved = socket.socket()
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            self._reserved.append(reserved)
            cluster.setdefault(name.split()[0], []).append(f"localhost:{reserved.getsockname()[1]}")
        return cluster

    def _start(self, name: str) -> None:
        kind, index = name.split()
        config = {"cluster": self._cluster_for(name, self.cluster), "task": {"type": kind, "index": int(index)}}
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"} | self._env
        environment["TF_CONFIG"] = json.dumps(config)
        script, out, err = (self.folder / file for file in ("program.py", f"{name}.out", f"{name}.err"))
        if name not in self._command:
            started = warm_python.start(script, int(index), env=environment, out=out, err=err, cwd=self.folder)
            self.processes[name] = started
            return
        words = [str(script) if word == "SCRIPT" else word for word in self._command[name]]
        with out.open("wb") as to_out, err.open("wb") as to_err:
            self.processes[name] = subprocess.Popen(
                words, env=environment, stdout=to_out, stderr=to_err, cwd=self.folder
            )

    def __enter__(self) -> Tasks:
        for name in self.names:
            self._start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for reserved in self._reserved:
            reserved.close()
        self._folder.cleanup()

    def output(self, name: str) -> str:
        """Return the output of a task."""
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def wait_for(self, name: str, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a task has printed a text."""

        def printed() -> bool:
            if self.processes[name].poll() is not None and text not in self.output(name):
                raise AssertionError(f"{name} ended without printing {text!r}: {self.end_of(name).stderr}")
            return text in self.output(name)

        wait_until(printed, timeout_s, f"{name} has not printed {text!r}")

    def kill(self, name: str) -> None:
        """Kill a task by SIGKILL."""
        self.processes[name].kill()

    def wait(self, timeout_s: float = 90.0) -> list[Task]:
        """Wait for all tasks, and return their ends in the order of the names."""
        return [self.end_of(name, timeout_s) for name in self.names]

    def end_of(self, name: str, timeout_s: float = 90.0) -> Task:
        """Wait for one task, and return its end."""
        process, until = self.processes[name], time.monotonic() + timeout_s
        while True:
            late = time.monotonic() > until  # read first, because this process may be suspended in between
            if process.poll() is not None:
                break
            if late:
                alive = [each.pid for each in self.processes.values() if each.poll() is None]
                outputs = "\n".join(f"{each}: {self.output(each)}" for each in self.names)
                raise AssertionError(f"{name} not done in {timeout_s} s\n{outputs}\n{processes.stacks(alive)}")
            time.sleep(0.01)
        err = (self.folder / f"{name}.err").read_text(errors="replace")
        return Task(name, process.returncode, self.output(name), err)
