"""Measurements of a replica's work, taken by its control thread while the main thread computes, at little cost."""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from types import CodeType, FrameType

import psutil

from distnb import activity
from distnb.accelerators import allocated_nbytes, device_memory
from distnb.runtime import step_count
from distnb.wire.messages import MemoryUse, TelemetrySample, Waiting

__all__ = ["Telemetry", "innermost", "memory", "name_cell", "remember_cell", "where_it_failed"]

_FEW_EVENTS = 64  # the most events of a sample, unless all are requested
_KNOWN_CALLS = 64
_CACHE = dis.opmap["CACHE"]
_labels: dict[str, str] = {}
_loaded = time.monotonic()
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def remember_cell(filename: str, label: str) -> None:
    """Let samples report the replica's line in this cell. `label` is the cell's name for users, "Cell In[3]"."""
    _labels[filename] = label.replace("Cell In[", "cell ").removesuffix("]") or "cell"


def name_cell(text: str, filename: str) -> str:
    """Replace a cell's file name in a frame of a traceback by the cell's name for users."""
    return text.replace(f'File "{filename}"', _labels.get(filename, f'File "{filename}"'), 1)


class Telemetry:
    """The measurements of this process. The threads of one `Control` use it.

    Attributes:
        detailed: True if each sample has every event since the sample before it.
    """

    detailed = False

    def __init__(self) -> None:
        self._latest_sent = 0  # the serial number of the newest event sent in a sample
        self._place: tuple[CodeType, int] | None = None
        self._calls: dict[tuple[CodeType, int], str] = {}
        self._machine = activity.machine()
        self._memory, self._schedule = _SystemFile("statm"), _SystemFile("schedstat")
        self._host_nbytes = int(psutil.virtual_memory().total)
        self._accelerator_nbytes: int | None = None

    def sample(self, engine: int, program: int, replica: int, *, steps: int | None = None) -> TelemetrySample:
        """Measure this process, with the events since the latest sample, or with those of the latest `steps`."""
        where, frame = self._where()
        most = _FEW_EVENTS if steps is None and not self.detailed else activity.MOST_EVENTS
        events = activity.latest(most, after=self._latest_sent if steps is None else 0)
        if steps is not None:
            events = activity.of_steps(events, steps)
        else:
            self._latest_sent = max((event[0] for event in events), default=0) or self._latest_sent
        schedule, allocated = self._schedule.numbers(), allocated_nbytes()
        return TelemetrySample(
            engine=engine,
            program=program,
            replica=replica,
            seconds=time.monotonic() - _loaded,
            steps=step_count.steps,
            examples=step_count.examples,
            rss_nbytes=self._memory.numbers()[1] * _PAGE_NBYTES,
            device_nbytes=allocated,
            where=where,
            call=self._call_under_way(frame),
            waiting=_waiting(),
            events=events,
            machine=self._machine,
            # The time that the main thread was ready to run but had no processor.
            queued_s=schedule[1] / 1e9 if schedule else None,
            processors=len(os.sched_getaffinity(0)),
            epochs=step_count.epochs_begun() if steps is None else (),
            reading=step_count.reading(),
            host_nbytes=self._host_nbytes,
            accelerator_nbytes=self._accelerator(allocated),
        )

    def _accelerator(self, allocated: int | None) -> int | None:
        """Return the total memory of the accelerator in bytes, or None before its first use. It is read only once."""
        if self._accelerator_nbytes is None and allocated is not None:
            known = device_memory()
            self._accelerator_nbytes = known[1] if known is not None else None
        return self._accelerator_nbytes

    def _where(self) -> tuple[str, FrameType | None]:
        main = threading.main_thread().ident or 0
        if threading.get_ident() == main:
            # No variable holds the frame: it would hold itself, and the callers' objects, until a garbage collection.
            return innermost(traceback.walk_stack(sys._getframe(1)))
        frame = sys._current_frames().get(main)
        return innermost(traceback.walk_stack(frame)) if frame is not None else ("", None)

    def _call_under_way(self, frame: FrameType | None) -> str:
        """Return the function that the main thread calls now, if it did so one sample ago, too; otherwise ""."""
        before, self._place = self._place, (frame.f_code, frame.f_lasti) if frame is not None else None
        if self._place is None or self._place != before:
            return ""
        if self._place not in self._calls:
            if len(self._calls) >= _KNOWN_CALLS:
                self._calls.clear()
            self._calls[self._place] = _callee(*self._place)
        return self._calls[self._place]


def memory(engine: int) -> MemoryUse:
    """Measure the memory of this process, of its machine, and of its accelerator if it has used one."""
    host = psutil.virtual_memory()
    device_free, device_total = device_memory() or (None, None)
    return MemoryUse(
        engine=engine,
        rss=int(psutil.Process().memory_info().rss),
        host_free=int(host.available),
        host_total=int(host.total),
        allocated=allocated_nbytes(),
        device_free=device_free,
        device_total=device_total,
    )


def where_it_failed(error: BaseException) -> str:
    """Return the innermost line of a cell in an error's traceback; "" if there is none."""
    return innermost(reversed(list(traceback.walk_tb(error.__traceback__))))[0]


def innermost(places: Iterable[tuple[FrameType, int]]) -> tuple[str, FrameType | None]:
    """Return the first of these frames and lines that belongs to a cell, as text for users, and the frame."""
    for frame, number in places:
        label = _labels.get(frame.f_code.co_filename)
        if label is not None:
            return f"{label}, line {number}", frame
    return "", None


def _waiting() -> Waiting | None:
    wait = activity.waiting()
    if wait is None:
        return None
    _, group, number, what, where = wait.arrival
    return Waiting(
        kind=wait.kind, what=what, where=where, group=group, number=number, seconds=activity.clock() - wait.begin
    )


def _callee(code: CodeType, instruction: int) -> str:
    """Return the function that an instruction calls, as the source names it ("time.sleep"); "" if it is no call."""
    content = code.co_code
    # During the call of a Python function `f_lasti` is at one of the caches that follow the CALL instruction:
    #     CALL  CACHE  CACHE  CACHE
    #     ^ the call          ^ f_lasti
    while instruction > 0 and content[instruction] == _CACHE:
        instruction -= 2
    if not dis.opname[content[instruction]].startswith("CALL"):
        return ""
    first, last, begin, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    if not all(lines):
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"".join(lines).decode(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return ""
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


class _SystemFile:
    """A file of numbers about this process in /proc, which stays open: opening it takes longer than reading it."""

    def __init__(self, name: str) -> None:
        self._descriptor: int | None = None
        with suppress(OSError):  # not every kernel has it
            self._descriptor = os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)

    def numbers(self) -> list[int]:
        """Return the numbers in it now; none if there is no such file."""
        if self._descriptor is None:
            return []
        return list(map(int, os.pread(self._descriptor, 256, 0).split()))
