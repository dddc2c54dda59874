"""The connection to a machine agent, through a process of this machine such as ssh.

    notebook ── stdin/stdout ──▶ ssh ── network ──▶ machine agent ──▶ engines
                                (here)              (there)

ipyparallel starts an engine in the background of the other machine and polls whether it still runs. Here the agent
reports each end at once, and its own by the end of the connection. Secrets travel on standard input. They are never in
an argument or a variable on any machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from distnb.cluster.local.launcher import LOST_AFTER_S
from distnb.cluster.local.orphans import end_group
from distnb.cluster.local.processes import Processes, describe_status
from distnb.cluster.process_environment import import_environment
from distnb.errors import StartError
from distnb.machines.agents.machine_messages import Assignment, decode_report, encode_order
from distnb.machines.transport import LOST, Found, Transport

__all__ = ["MachineLink"]

_logger = logging.getLogger("distnb.machines")

_OUTPUT_CHARS = 2000
_CHUNK = 1 << 16
_WAIT_S = 3.0
_SIGNALLED = range(129, 128 + signal.NSIG)  # exit statuses for ends by a signal, the form that ssh and srun pass on

Ended = Callable[[str, bool], None]
"""A function called with (how an engine ended, whether that was requested) in the watcher's thread."""


class MachineLink:
    """The agent of one machine, from its start to its end.

    The methods may be called in any thread. `processes.changed` is notified of facts and ends.

    Args:
        host: The machine, by the transport's name.
        transport: The way to it.
        processes: The supervisor of the process here, to whose directory its errors are written.

    Raises:
        StartError: The transport's command cannot be started.
    """

    def __init__(self, host: str, transport: Transport, processes: Processes) -> None:
        self.host = host
        self._transport, self._processes = transport, processes
        self.found: Found | None = None
        """What the machine has, once it has answered with the right versions."""
        self.failure = ""
        """The reason why it cannot be used, in words, if it ended or has the wrong versions before an answer."""
        self.is_open = True
        self._engines: dict[int, tuple[Path, Ended]] = {}  # those that run: their logs, and functions for their ends
        self._expected: set[int] = set()
        self._begun = self._closing = False
        self._closed_words: str | None = None
        self._rest = b""
        self._silence: asyncio.TimerHandle | None = None
        self._writing = threading.Lock()
        folder = processes.directory / "log"
        folder.mkdir(exist_ok=True)
        self._errors = folder / f"machine-{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:80]}.log"
        try:
            with processes.changed, open(self._errors, "wb") as errors:
                self._process = processes.start(
                    transport.command(host),
                    self._process_ended,
                    asked=True,
                    env={**transport.environment(), **import_environment()},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,
                )
                self.pid = self._process.pid
                assert self._process.stdin is not None
                assert self._process.stdout is not None
                self._stdin, self._stdout = self._process.stdin, self._process.stdout
                os.set_blocking(self._stdout.fileno(), False)
        except OSError as error:
            raise StartError(f"{transport.unreached(host, LOST)} The command cannot be started: {error}.") from error
        processes.loop.call_soon_threadsafe(self._begin_reading)
        _logger.info("process %d connects to the machine agent on %s", self.pid, host)

    # -- orders ------------------------------------------------------------------------------------------------------

    def launch(
        self, assignment: Assignment, devices: Mapping[int, str], sharing: int, logs: Mapping[int, tuple[Path, Ended]]
    ) -> None:
        """Start engines.

        Args:
            assignment: The cluster, which the agent needs once.
            devices: The engines' devices.
            sharing: The number of engines that share the machine.
            logs: For each engine, the file for its output, and the function that is called at its end.
        """
        with self._processes.changed:
            self._engines |= logs
            self._expected.difference_update(logs)
            if not self.is_open:
                self._lose_engines("")
                return
        if not self._begun:
            self._begun = True
            self._send("begin", dataclasses.asdict(assignment))
        self._send("launch", [*devices.items()], sharing)

    def expect_end(self, engines: Sequence[int]) -> None:
        """Mark the ends of these engines, from now on, as requested."""
        self._expected.update(engines)

    def end(self, engines: Sequence[int]) -> None:
        """Ask the agent to end engines."""
        self._send("end", [*engines])

    def running(self, engines: Sequence[int]) -> list[int]:
        """Return those among these engines that have not ended."""
        return [engine for engine in engines if engine in self._engines]

    def close(self) -> None:
        """Ask the agent to end its engines and itself."""
        self._closing = True
        self._send("close")
        with suppress(OSError):
            self._stdin.close()

    def _send(self, *words: Any) -> None:
        _logger.debug("to the machine agent on %s: %s", self.host, words[0])
        with self._writing, suppress(OSError, ValueError):  # the agent has ended, which is reported
            self._stdin.write(encode_order(*words))

    # -- reports, in the watcher's thread ------------------------------------------------------------------------------

    def _begin_reading(self) -> None:
        if self.is_open:
            self._processes.loop.add_reader(self._stdout, self._receive)
            self._processes.loop.call_later(_WAIT_S, self._ask_to_wait)

    def _ask_to_wait(self) -> None:
        """Keep the agent until its cluster begins, since it may not learn of the end of this process."""
        if self.is_open and not self._begun:
            self._send("wait")
            self._processes.loop.call_later(_WAIT_S, self._ask_to_wait)

    def _receive(self) -> bool:
        """Read and handle the available lines. Return whether there may be more."""
        try:
            data = os.read(self._stdout.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._processes.loop.remove_reader(self._stdout)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if (report := decode_report(line)) is not None:
                self._handle(report)
        return True

    def _handle(self, report: Sequence[Any]) -> None:
        match report:
            case ["beat"]:
                if self._silence is not None:
                    self._silence.cancel()
                self._silence = self._processes.loop.call_later(LOST_AFTER_S, self._give_up)
            case "facts", facts:
                self._note_facts(facts)
            case "output", engine, text:
                if engine in self._engines:
                    _append(self._engines[engine][0], text)
            case "ended", engine, words if self._closed_words is None:
                self._engine_ended(engine, f"(on {self.host}) {words}")
            case "closes", words:
                self._closed_words = words

    def _note_facts(self, facts: Mapping[str, Any]) -> None:
        with self._processes.changed:
            try:
                self.found = Found.of(self.host, facts)
                _logger.info("%s has %d GPUs and %s", self.host, *self.found[:2])
            except StartError as error:
                self.failure = str(error)
            self._processes.changed.notify_all()

    def _engine_ended(self, engine: int, words: str) -> None:
        with self._processes.changed:
            _, ended = self._engines.pop(engine, (None, None))
            expected = self._closing or engine in self._expected
        if ended is not None:
            ended(words, expected)
        with self._processes.changed:
            self._processes.changed.notify_all()

    def _give_up(self) -> None:
        _logger.warning("no heartbeat of %s arrived for %g s", self.host, LOST_AFTER_S)
        self._closed_words = ""
        _kill_tree(self._process)

    def _process_ended(self, pid: int, words: str, expected: bool) -> None:
        """Report all engines that have not ended as lost, or as the agent has explained."""
        self._closing = self._closing or expected
        while self._receive():  # the last lines
            pass
        self._processes.loop.remove_reader(self._stdout)
        if self._silence is not None:
            self._silence.cancel()
        with self._writing:
            self._stdin.close()
        self._stdout.close()
        with self._processes.changed:
            self.is_open = False
            status = self._process.returncode
            if self.found is None and not self.failure:
                said = "\n".join(f"    {line}" for line in self.errors().strip().splitlines()[-5:])
                self.failure = f"{self._transport.unreached(self.host, status)} Its output:\n{said or '    (nothing)'}"
            self._processes.changed.notify_all()
        how = self._describe(words, status)
        _logger.info("the machine agent on %s %s", self.host, how or "was lost")
        self._lose_engines(how)

    def _describe(self, words: str, status: int) -> str:
        """Return how the agent ended, in words; "" if its machine was lost.

        The end of the local process would not suffice: srun and mpiexec detect the loss of the other machine late or
        never, and each reports an exit status in its own way.
        """
        if self._closed_words is not None:
            return self._closed_words
        if status < 0:
            return words  # the local process was killed
        # A manager such as Slurm ends an agent by a signal (scancel). Then the machine is still reachable.
        return describe_status(128 - status) if self._silence is not None and status in _SIGNALLED else ""

    def _lose_engines(self, how: str) -> None:
        said = self.errors()
        cause = self._transport.cause(said)
        # If the transport reports a cause (scancel, a time limit), that explains the silence.
        words = f"(on {self.host}) {how or 'was ended'}"
        if not how and not cause:
            words = f"was lost: its machine {self.host} cannot be reached"
        for engine, (log, _) in [*self._engines.items()]:
            _append(log, said)
            self._engine_ended(engine, words + (f" ({cause})" if cause else ""))

    def errors(self) -> str:
        """Return what the command wrote to standard error last."""
        try:
            return self._errors.read_text(errors="replace")[-_OUTPUT_CHARS:]
        except OSError:
            return ""


def _append(path: Path, text: str) -> None:
    with suppress(OSError), open(path, "a", errors="replace") as log:
        log.write(text)


def _kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process that is not reaped yet, and all of its descendants.

    Some descendants are in other process groups: mpiexec starts its ssh in a separate one.
    """
    with suppress(psutil.Error):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                descendant.kill()
    end_group(process.pid)
