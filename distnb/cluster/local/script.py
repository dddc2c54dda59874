"""A script on several replicas of this machine, which `distnb run` starts."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from distnb.cluster import tpu_chips
from distnb.cluster.local.processes import Processes, describe_status
from distnb.cluster.local.script_replica import error_path
from distnb.cluster.network import require_loopback
from distnb.cluster.process_environment import PYTHON_MODULE, Seat, script_environment
from distnb.cluster.rendezvous_store import RendezvousStore, free_port
from distnb.cluster.worker_placement import WorkerPlacement, network_environment, own_interface, split_address
from distnb.errors import StartError
from distnb.process_log import close_log, open_log
from distnb.topology import Device

__all__ = ["run_script"]

_logger = logging.getLogger("distnb.cluster.script")

_EXIT_S = 3.0  # the time in which a replica that has reported an error may exit by itself
_REPLICA = (*PYTHON_MODULE, "distnb.cluster.local.script_replica")


def run_script(command: Sequence[str], devices: Sequence[Device], placement: WorkerPlacement | None = None) -> int:
    """Run one replica of a script per device, and wait until all of them have ended.

    If this machine is one worker of a cluster, its replicas belong to a larger group. Then the launcher on the chief's
    machine serves the rendezvous store at the chief's address.

    The replicas' lines are printed as they arrive, marked with the replica's number. When a replica fails, the others
    are ended, and the traceback of the failed replica is printed last.

    Args:
        command: `SCRIPT ARGUMENT…` or `-m MODULE ARGUMENT…`.
        placement: The position of this worker in a cluster; None for a script that stays on this machine.

    Returns:
        The exit code: 0, or that of the replica that failed first (128 + n for signal n).
    """
    if placement is not None and any(device.type == "tpu" for device in devices):
        raise StartError(
            "distnb uses the TPU chips of one machine only, but TF_CONFIG names several. Use one machine, or GPUs."
        )
    if placement is None:
        require_loopback()
    with ExitStack() as undo:  # each step is undone, even if undoing another fails
        run = _ScriptRun()
        undo.callback(run.close)
        store, seat = _store_and_seat(placement, run.directory)
        # torch loads here while it loads in the replicas. Early requests wait in the socket's queue.
        serving = None
        if store is not None:
            undo.callback(store.close)
            serving = threading.Thread(target=store.serve, name="distnb-store", daemon=True)
            undo.callback(_finish, serving)
        run.first, run.size, run.mark = seat.worker * len(devices), seat.workers * len(devices), len(devices) > 1
        for_chips = tpu_chips.launch_environment(devices)
        for rank, device in enumerate(devices):
            environment = script_environment(rank, device, devices, seat) | (for_chips if device.type == "tpu" else {})
            run.start_replica(command, environment)
        if serving is not None:
            serving.start()
        try:
            return run.wait()
        except BaseException as error:  # before the store is closed
            run.end_all(interrupt=isinstance(error, KeyboardInterrupt))
            raise


def _store_and_seat(placement: WorkerPlacement | None, directory: Path) -> tuple[RendezvousStore | None, Seat]:
    """Return the store, if it is served here, and the position of this worker's replicas."""
    if placement is None:
        return None, Seat(store_host="127.0.0.1", store_port=free_port(), store_file=str(directory / "store"))
    interface, address = own_interface(placement)
    host, port = split_address(placement.chief.address)
    served = RendezvousStore(port, address) if placement.index == 0 else None
    network = network_environment(interface)
    return served, Seat(
        store_host=address if served else host,
        store_port=port,
        worker=placement.index,
        workers=len(placement.workers),
        network=network,
    )


def _finish(thread: threading.Thread) -> None:
    """Wait for a thread if it was started: an interpreter that exits while a thread imports torch may crash."""
    if thread.is_alive():
        thread.join()


class _ScriptRun:
    """The replicas of one script on this machine.

    Attributes:
        mark: True if lines carry the replica's number.
        first: The number of the first replica here.
        size: The number of replicas on all machines.
    """

    mark, first, size = False, 0, 1

    def __init__(self) -> None:
        self._failed: list[int] = []  # ranks, in the order in which their failures were reported
        self._pids: list[int] = []
        self._printers: list[threading.Thread] = []
        self._print_lock = threading.Lock()
        self._processes = Processes()
        self.directory = self._processes.directory
        try:
            open_log(self.directory, "script")
        except BaseException:
            self._processes.close()
            raise
        self._reports, self._report_to = os.pipe()  # a pipe by which failed replicas report their ranks
        loop = self._processes.loop
        loop.call_soon_threadsafe(loop.add_reader, self._reports, self._receive_reports)

    def start_replica(self, command: Sequence[str], environment: dict[str, str]) -> None:
        rank, pipe = len(self._pids), subprocess.PIPE
        words = [*_REPLICA, *map(str, (os.getpid(), self.directory, rank, self._report_to)), *command]
        with self._processes.changed:
            replica = self._processes.start(
                words,
                self._ended,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                pass_fds=(self._report_to,),
            )
            self._pids.append(replica.pid)
        for source, target in ((replica.stdout, sys.stdout), (replica.stderr, sys.stderr)):
            name = f"distnb-print-{rank}"
            printer = threading.Thread(target=self._print_lines, args=(rank, source, target), name=name, daemon=True)
            printer.start()
            self._printers.append(printer)

    def _print_lines(self, rank: int, source: IO[bytes], target: IO[str]) -> None:
        mark = f"[{self.first + rank}] " if self.mark else ""
        try:
            for line in _lines(source):
                with self._print_lock:
                    target.write(mark + line)
                    target.flush()
        except BrokenPipeError:  # the reader of our output has ended
            with self._print_lock, open(os.devnull, "wb") as devnull:
                os.dup2(devnull.fileno(), target.fileno())  # for the rest that Python flushes at exit
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGPIPE)

    # -- in the watcher's thread ------------------------------------------------------------------------------------

    def _receive_reports(self) -> None:
        for rank in os.read(self._reports, 1 << 16).split():
            self._mark_failed(int(rank))

    def _mark_failed(self, rank: int) -> None:
        _logger.info("replica %d failed", rank)
        with self._processes.changed:
            if rank not in self._failed:
                self._failed.append(rank)
            self._processes.changed.notify_all()

    def _ended(self, pid: int, status: str, expected: bool) -> None:
        if self._processes.status(pid) != 0 and not expected:
            with self._processes.changed:  # it may end before `start_replica` has noted its pid
                rank = self._pids.index(pid)
            self._mark_failed(rank)

    # -- in the main thread -----------------------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait until all replicas have succeeded, or one has failed. Return the exit code."""
        processes = self._processes
        with processes.changed:
            processes.changed.wait_for(lambda: self._failed or all(map(processes.has_ended, self._pids)))
            if not self._failed:
                return 0
            reported = [self._pids[rank] for rank in self._failed]
            processes.changed.wait_for(lambda: any(map(processes.has_ended, reported)), _EXIT_S)
        self.end_all()
        return self._explain(*self._first_failure())

    def _first_failure(self) -> tuple[int, str]:
        """Return the replica that failed first, and its traceback. A replica that was killed has no traceback."""
        errors = {}
        for rank in range(len(self._pids)):
            with suppress(OSError, ValueError):
                error = json.loads(error_path(self.directory, rank).read_text())
                errors[rank] = float(error["time"]), str(error["traceback"])
        first = self._failed[0]
        if first not in errors:
            return first, ""
        first = min(errors, key=errors.__getitem__)
        return first, errors[first][1]

    def _explain(self, rank: int, text: str) -> int:
        status = self._processes.status(self._pids[rank])
        how, code = describe_status(status), 1 if not status else status if status > 0 else 128 - status
        if text and code != 1:
            how, code = "failed", 1  # it reported its error, and was ended before it could exit
        others, here = len(self._pids) - 1, " here" if self.size > len(self._pids) else ""
        ended = (f" The other replica{here} was ended.", f" The {others} others{here} were ended.")[others > 1]
        print(f"distnb run: replica {self.first + rank} of {self.size} {how}.{ended * (others > 0)}", file=sys.stderr)
        if text and others:
            print(f"Its traceback:\n\n{text}", end="", file=sys.stderr)
        sys.stderr.flush()
        return code

    def end_all(self, *, interrupt: bool = False) -> None:
        """End the running replicas. If the user interrupted the script, send them SIGINT first."""
        self._processes.end(self._pids, self._interrupt if interrupt else None)
        for printer in self._printers:
            printer.join(timeout=1.0)

    def _interrupt(self) -> None:
        self._processes.signal(self._pids, signal.SIGINT)

    def close(self) -> None:
        """End all processes and free all resources, however the run went."""
        try:
            self.end_all()
        finally:
            close_log()
            self._processes.close()
            os.close(self._reports)
            os.close(self._report_to)


def _lines(pipe: IO[bytes]) -> Iterator[str]:
    """Yield text lines of a pipe as they arrive. A carriage return ends a line, too, so that progress bars move."""
    rest = b""
    while data := os.read(pipe.fileno(), 65536):
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", rest + data)
        yield from (line.decode(errors="replace") for line in lines if line.strip(b"\r"))
    if rest:
        yield rest.decode(errors="replace") + "\n"
    pipe.close()
