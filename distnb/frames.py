"""Frames: of tracebacks, of which a user is to see his own, and those in which nothing may be raised from outside."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType, TracebackType

from distnb.errors import DistnbError

__all__ = ["LOCKING", "OWN", "chain", "frames_of", "ours", "rebuilt", "torch_frames", "with_frames", "within"]

OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""What the files of distnb's own frames begin with."""


def _codes(*sources: object) -> Iterator[CodeType]:
    """Of functions and of classes' methods, with those of functions that they make."""
    for source in sources:
        if isinstance(source, FunctionType):
            yield source.__code__
            yield from (each for each in source.__code__.co_consts if isinstance(each, CodeType))
        elif isinstance(source, type):
            yield from _codes(*vars(source).values())


def _of_import() -> Iterator[object]:
    names = ("_get_module_lock", "_ModuleLock", "_ModuleLockManager", "_BlockingOnManager")  # the last: Python >= 3.12
    return (vars(importlib._bootstrap).get(name) for name in names)


LOCKING = frozenset(
    _codes(
        threading.Condition.__enter__,
        threading.Condition.__exit__,
        threading.Condition._release_save,  # type: ignore[attr-defined]
        threading.Condition._acquire_restore,  # type: ignore[attr-defined]
        *_of_import(),
    )
)
"""Code in which a lock is taken and not yet known to be, or about to be released: a `threading.Event`'s, or import's.

What a signal's handler raises there leaves the lock taken, and whoever wants to notify, or to import, waits for ever.
"""


def within(frame: FrameType | None, codes: Collection[CodeType]) -> bool:
    """Whether a frame, or one that has called it, runs one of these codes."""
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def torch_frames(error: BaseException) -> tuple[str, ...]:
    """What the files of torch's frames begin with, if they are to be left out, as of an error of ours.

    That one is about the line in which the user called torch, and torch's way from there to us tells nothing.
    """
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return (os.path.dirname(file) + os.sep,) if file and isinstance(error, DistnbError) else ()


def ours(frame: FrameType) -> bool:
    """Whether what a frame raised is ours: it is distnb's, and not one that does no more than call the user's function.

    Such a one is hidden from debuggers, too; the function may be a builtin, and have no frame.
    """
    return frame.f_code.co_filename.startswith(OWN) and "__tracebackhide__" not in frame.f_locals


def frames_of(traceback: TracebackType | None) -> list[TracebackType]:
    """A traceback's frames, the outermost first."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def rebuilt(frames: Sequence[TracebackType]) -> TracebackType | None:
    """A traceback of these frames alone."""
    whole: TracebackType | None = None
    for frame in reversed(frames):
        whole = TracebackType(whole, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return whole


def chain(error: BaseException) -> list[BaseException]:
    """It, and what is shown with it: its causes, or what was being handled when it was raised."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and all(each is not known for known in found):
        found.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return found


@contextmanager
def with_frames(error: BaseException, chosen: Callable[[BaseException], Sequence[TracebackType]]) -> Iterator[None]:
    """For the while, give an error, and all that is shown with it, tracebacks of chosen frames."""
    with ExitStack() as stack:
        for each in chain(error):
            frames = chosen(each)
            stack.callback(each.with_traceback, each.__traceback__)
            each.with_traceback(rebuilt(frames))
        yield
