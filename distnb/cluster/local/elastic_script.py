"""An elastic script on this machine, which `distnb run --min` starts: lost processes are replaced."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from distnb.cluster.generations import DONE, READY, generation_path
from distnb.cluster.local.elastic_members import Dismiss, ElasticMembers, End, Notify, Order, Publish, Start
from distnb.cluster.local.loopback import require_loopback
from distnb.cluster.local.processes import describe_status
from distnb.cluster.local.script import EXIT_S, ScriptRun
from distnb.cluster.process_environment import DEVICE_VARIABLE, STORE_VARIABLE, Seat, script_environment
from distnb.cluster.rendezvous_store import free_port
from distnb.errors import OptionError
from distnb.topology import Device

__all__ = ["run_elastic_script"]


def run_elastic_script(command: Sequence[str], devices: Sequence[Device], minimum: int, limit_s: float) -> int:
    """Run a script in one process per device, replace processes that are killed, and wait until all have ended.

    The lines of process n are marked with `[n]`. A process that replaces another one has a number of its own.

    Args:
        command: `SCRIPT ARGUMENT…` or `-m MODULE ARGUMENT…`.
        devices: The devices.
        minimum: The smallest number of processes that train.
        limit_s: The time for which there may be fewer.

    Returns:
        The exit code: 0, or that of the process that ended the script (128 + n for signal n).

    Raises:
        OptionError: The numbers do not fit, or the devices are TPU chips.
    """
    if not 1 <= minimum <= len(devices):
        raise OptionError(f"--min {minimum} with at most {len(devices)} processes: give a number from 1 to that.")
    if not limit_s > 0:
        raise OptionError(f"--wait {limit_s:g}: give a time in seconds.")
    if any(device.type == "tpu" for device in devices):
        raise OptionError("TPU chips cannot be given to a new process while others use them. Leave out --min.")
    require_loopback()
    with ExitStack() as undo:
        run = _ElasticRun(command, devices, minimum, limit_s)
        undo.callback(run.close)
        run.start_first()
        try:
            return run.wait()
        except BaseException as error:
            run.end_all(interrupt=isinstance(error, KeyboardInterrupt))
            raise


class _ElasticRun(ScriptRun):
    """The processes of an elastic script. The watcher's thread notes events, and the main thread handles them."""

    def __init__(self, command: Sequence[str], devices: Sequence[Device], minimum: int, limit_s: float) -> None:
        super().__init__()
        self.mark = True
        self._command = command
        self._events: deque[Callable[[float], Sequence[Order]]] = deque()
        os.set_blocking(self._reports, False)
        self._place = Seat(store_host="127.0.0.1", store_port=free_port(), store_file=str(self.directory / "store"))
        self._environments = [
            script_environment(seat, device, devices, self._place) for seat, device in enumerate(devices)
        ]
        names = [environment[DEVICE_VARIABLE] for environment in self._environments]
        self._members = ElasticMembers(names, minimum, limit_s)
        self._members.published.write(generation_path(self.directory))

    def start_first(self) -> None:
        """Start a process on each device."""
        for environment in self._environments:
            self.start_replica(self._command, environment)

    # -- in the watcher's thread -------------------------------------------------------------------------------------

    def _note(self, *events: Callable[[float], Sequence[Order]]) -> None:
        with self._processes.changed:
            self._events += events
            self._processes.changed.notify_all()

    def _receive_reports(self) -> None:
        try:
            words = os.read(self._reports, 1 << 16).decode().split()
        except BlockingIOError:
            return
        for word in words:
            kind, _, number = word.rpartition("-")
            handle = {READY: self._members.ready, DONE: self._members.done}.get(kind, self._members.failed)
            self._note(lambda now, handle=handle, number=int(number): handle(number, now=now))  # type: ignore[misc]

    def _ended(self, pid: int, status: str, expected: bool) -> None:
        self._receive_reports()  # those that it made before its end
        with self._processes.changed:
            number, code = self._pids.index(pid), self._processes.status(pid)
        if expected:
            return
        if code == 0:
            self._note(lambda now: self._members.succeeded(number, now=now))
        elif code is not None and code > 0:
            self._note(lambda now: self._members.failed(number, now=now))
        else:
            self._note(lambda now: self._killed(number, status, now))

    # -- in the main thread ------------------------------------------------------------------------------------------

    def _killed(self, number: int, status: str, now: float) -> Sequence[Order]:
        orders = self._members.killed(number, now=now)
        is_explained = any(isinstance(order, End) and not order.reason for order in orders)
        return orders if is_explained else [Notify(f"Process {number} {status}."), *orders]

    def wait(self) -> int:
        """Handle events until the script has ended. Return its exit code."""
        changed = self._processes.changed
        while True:
            with changed:
                due = self._members.deadline
                changed.wait_for(lambda: self._events, None if due is None else max(0.0, due - time.monotonic()))
                events = list(self._events)
                self._events.clear()
            for event in [*events, self._tick]:
                for order in event(time.monotonic()):
                    if isinstance(order, End):
                        return self._end(order)
                    self._obey(order)

    def _tick(self, now: float) -> Sequence[Order]:
        return self._members.tick(now=now)

    def _obey(self, order: Order) -> None:
        match order:
            case Publish(generation):
                generation.write(generation_path(self.directory))
            case Start(number, seat):
                self._say(f"Process {number} is started on {self._environments[seat][DEVICE_VARIABLE]}.")
                self.start_replica(self._command, self._environments[seat] | self._alone(number))
            case Dismiss(numbers):
                self._processes.end([self._pids[number] for number in numbers])
            case Notify(text):
                self._say(text)

    def _alone(self, number: int) -> dict[str, str]:
        """Return the variables of a process that sets up by itself, until it joins the others."""
        return {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_PORT": str(free_port()),
            STORE_VARIABLE: str(self.directory / f"store-of-{number}"),
        }

    def _say(self, text: str) -> None:
        with self._print_lock:
            print(f"distnb run: {text}", file=sys.stderr, flush=True)

    def _end(self, order: End) -> int:
        number = order.number
        if number is None:
            self.end_all()
            return 0
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: self._processes.has_ended(self._pids[number]), EXIT_S)
        self.end_all()
        self._failed = [number]
        if order.reason:
            self._say(f"{order.reason} The script is ended.")
            return self._code(number)
        return self._explain(*self._first_failure())

    def _failures(self) -> Iterable[int]:
        return [number for number in range(len(self._pids)) if number not in self._members.published.lost]

    def _code(self, number: int) -> int:
        status = self._processes.status(self._pids[number])
        return 1 if not status else status if status > 0 else 128 - status

    def _explain(self, rank: int, text: str) -> int:
        code = self._code(rank)
        how = describe_status(self._processes.status(self._pids[rank]))
        if text and code != 1:
            how, code = "failed", 1  # it reported its error, and was ended before it could exit
        print(f"distnb run: process {rank} {how}. The others were ended.", file=sys.stderr)
        if text:
            print(f"Its traceback:\n\n{text}", end="", file=sys.stderr)
        sys.stderr.flush()
        return code
