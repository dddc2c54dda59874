"""A real IPython kernel, driven as by a front end: tests see only what a user would see.

Example:
    >>> with Notebook() as notebook:
    ...     notebook.run("x = 1")
    ...     assert notebook.run("print(x)").stdout == "1\n"
"""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from tests.support import processes

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Ran:
    """The effects of one cell, as its front end received them."""

    source: str
    status: str = "running"
    error_name: str = ""
    error_text: str = ""
    traceback: str = ""
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)

    def check(self) -> Ran:
        """Return itself if the cell ended well; otherwise raise an AssertionError with its traceback."""
        assert self.status == "ok", (
            f"{self.source}\n{self.error_name}: {self.error_text}\n{self.traceback}\n{self.stderr}"
        )
        return self

    @property
    def text(self) -> str:
        """The plain text of everything shown."""
        return self.stdout + "".join(str(data.get("text/plain", "")) for data in self.displays)


class Notebook:
    """A kernel with distnb loaded.

    Args:
        engines: Start a cluster of that many CPU engines at once; 0 for none.
        env: Added to the kernel's environment. GPUs are hidden unless it says otherwise.
        shared: The folder for the files of a notebook that modules share. Its files and processes belong to no test.
        python: The interpreter of the kernel; None for this one.
    """

    def __init__(
        self,
        engines: int = 0,
        *,
        env: dict[str, str] | None = None,
        shared: Path | None = None,
        python: Path | None = None,
    ) -> None:
        self.engines = engines
        self._mark = processes.SHARED_MARK if shared else processes.MARK
        self._manager = KernelManager(kernel_name="python3", cache_ports=False)
        if python is not None:
            self._manager.kernel_spec.argv[0] = str(python)  # type: ignore[union-attr]
        if shared:
            self._manager.connection_file = str(shared / "kernel.json")
        self._reserved = [self._reserve(channel) for channel in ("shell", "iopub", "stdin", "hb", "control")]
        self._env = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "CUDA_VISIBLE_DEVICES": "",
            processes.MARK_NAME: self._mark,
            **({"TMPDIR": str(shared)} if shared else {}),
            **(env or {}),
        }

    def _reserve(self, channel: str) -> socket.socket:
        """Take the port of a channel now. The kernel binds it in addition to this socket, and no other process can.

        Jupyter looks for free ports and releases them until the kernel takes them, seconds later.
        """
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        setattr(self._manager, f"{channel}_port", reserved.getsockname()[1])
        return reserved

    def __enter__(self) -> Notebook:
        self._manager.start_kernel(env=self._env)
        self._client = self._manager.client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=120)
            self.run("%load_ext distnb")
            if self.engines:
                self.run(f"%distnb start -n {self.engines}", timeout_s=120)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The id of the kernel's process."""
        provisioner = self._manager.provisioner
        assert provisioner is not None
        return int(provisioner.process.pid)  # type: ignore[attr-defined]

    def processes(self) -> dict[int, psutil.Process]:
        """Return the processes of a shared notebook: the kernel and those it started. For another, all of this run."""
        return processes.marked(self._mark)

    def close(self) -> None:
        """Close the notebook as a front end does: ask the kernel to end, and kill it if it does not."""
        with contextlib.suppress(AttributeError):
            self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()
        for reserved in self._reserved:
            reserved.close()

    # -- cells --------------------------------------------------------------------------------------------------

    def start(self, source: str, *, allow_stdin: bool = False) -> str:
        """Begin a cell. `finish` waits for it."""
        return str(self._client.execute(source, allow_stdin=allow_stdin))

    def finish(self, message: str, source: str = "", *, timeout_s: float = 60.0) -> Ran:
        """Wait for a cell. Raise an AssertionError with the stacks of all processes if it takes longer."""
        ran = Ran(source)
        for kind, content in self.events(message, timeout_s):
            _take(ran, kind, content)
        reply = self.reply(message)
        ran.status = reply["status"]
        if ran.status == "error" and not ran.error_name:
            ran.error_name, ran.error_text = reply["ename"], reply["evalue"]
        return ran

    def try_run(self, source: str, *, timeout_s: float = 60.0) -> Ran:
        """Run a cell that may fail."""
        return self.finish(self.start(source), source, timeout_s=timeout_s)

    def run(self, source: str, *, timeout_s: float = 60.0) -> Ran:
        """Run a cell that must not fail."""
        return self.try_run(source, timeout_s=timeout_s).check()

    def survives(self, source: str) -> bool:
        """Run a cell. Return whether the kernel has not ended in it."""
        message = self.start(source)
        while self._manager.is_alive():
            with contextlib.suppress(queue.Empty):
                if self._client.get_shell_msg(timeout=0.1)["parent_header"].get("msg_id") == message:
                    return True
        return False

    def converse(self, source: str, *answers: str, timeout_s: float = 60.0) -> tuple[Ran, list[str]]:
        """Run a cell that asks, as `input` and debuggers do. Return the cell's effects and its prompts."""
        message = self.start(source, allow_stdin=True)
        asked = []
        for answer in answers:
            asked.append(self.asked(timeout_s))
            self.answer(answer)
        ran = self.finish(message, source, timeout_s=timeout_s)
        ran.stdout = _ANSI.sub("", ran.stdout)  # debuggers colour their output
        return ran, asked

    def asked(self, timeout_s: float = 60.0) -> str:
        """Wait until the running cell asks, and return its prompt."""
        try:
            return str(self._client.get_stdin_msg(timeout=timeout_s)["content"]["prompt"])
        except queue.Empty:
            pids = sorted(self.processes())
            raise AssertionError(f"nothing was asked in {timeout_s} s\n{processes.stacks(pids)}") from None

    def answer(self, line: str) -> None:
        """Answer the prompt."""
        self._client.input(line)

    def value(self, expression: str) -> Any:
        """Return the value of an expression whose repr is a literal. Libraries such as Ray may print meanwhile."""
        ran = self.run(f"print('«' + repr({expression}) + '»', flush=True)")
        return ast.literal_eval(ran.stdout.partition("«")[2].rpartition("»")[0])

    def interrupt(self) -> None:
        """Press the stop button."""
        self._manager.interrupt_kernel()

    def complete(self, code: str) -> list[str]:
        """Return the completions that Tab offers at the end of `code`."""
        reply = self._client.complete(code, reply=True, timeout=30)
        return list(reply["content"]["matches"])

    # -- messages --------------------------------------------------------------------------------------------------

    def events(self, message: str, timeout_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the cell's messages as they come, until it is done."""
        deadline = time.monotonic() + timeout_s
        while True:
            got = self._next(deadline, timeout_s)
            if got["parent_header"].get("msg_id") != message:
                continue
            kind, content = got["msg_type"], got["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            yield kind, content

    def wait_for_output(self, message: str, text: str, *, timeout_s: float = 60.0) -> str:
        """Read a running cell's stdout until it contains `text`, and return what was read."""
        seen = ""
        for kind, content in self.events(message, timeout_s):
            if kind == "stream" and content["name"] == "stdout":
                seen += content["text"]
                if text in seen:
                    return seen
            if kind == "error":
                raise AssertionError(f"failed before {text!r} came: {content['ename']}: {content['evalue']}")
        raise AssertionError(f"the cell ended before {text!r} came; it wrote {seen!r}")

    def _next(self, deadline: float, timeout_s: float) -> dict[str, Any]:
        try:
            return dict(self._client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic())))
        except queue.Empty:
            pids = sorted(self.processes())
            raise AssertionError(f"not done in {timeout_s} s\n{processes.stacks(pids)}") from None

    def reply(self, message: str) -> dict[str, Any]:
        """Return the kernel's reply to a cell."""
        while True:
            reply = self._client.get_shell_msg(timeout=30)
            if reply["parent_header"].get("msg_id") == message:
                return dict(reply["content"])


class Shared:
    """A notebook for the whole run, with two engines. Each module gets it as if it were new; a broken one is replaced.

    Args:
        folder: The folder for its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: Notebook | None = None
        self._environment: dict[str, str] = {}

    def take(self) -> Notebook:
        """Return the notebook, and start it if there is none."""
        if self._current is None:
            self._current = Notebook(engines=2, shared=self._folder).__enter__()
            self._environment = self._current.value("dict(__import__('os').environ)")
        return self._current

    def clear(self) -> None:
        """Remove everything that a module has left there. If that fails, close the notebook."""
        if self._current is None:
            return
        try:
            # Processes spawned by multiprocessing look for this name, which IPython removes, too.
            self._current.run("%reset -f\n__spec__ = None", timeout_s=30)
            self._current.run(
                f"import os, torch\nos.chdir({os.getcwd()!r})\nos.environ.clear()\n"
                f"os.environ.update({self._environment!r})\ntorch.set_default_dtype(torch.float32)\ndel os, torch"
            )
            works = self._current.run("%%distribute mirrored\nprint(strategy.num_replicas_in_sync)", timeout_s=30)
            assert lines_of_each(works.stdout) == [["2"], ["2"]], works
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the notebook."""
        if self._current is not None:
            current, self._current = self._current, None
            current.close()


def lines_of_each(text: str, replicas: int = 2) -> list[list[str]]:
    """Return the lines that each replica wrote, from a cell's output.

    A line of all replicas is shown once, "[0-1] fine", unless one wrote it tenths of a second later on a busy machine.
    """
    marked = re.findall(r"^\[(\d+)(?:-(\d+))?\] (.*)$", text, re.MULTILINE)
    return [
        [line for first, last, line in marked if int(first) <= replica <= int(last or first)]
        for replica in range(replicas)
    ]


def _take(ran: Ran, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        setattr(ran, content["name"], getattr(ran, content["name"]) + content["text"])
    elif kind == "error":
        ran.error_name, ran.error_text = content["ename"], content["evalue"]
        ran.traceback = _ANSI.sub("", "\n".join(content["traceback"]))
    elif kind in ("display_data", "execute_result", "update_display_data"):
        ran.displays.append(content["data"])
