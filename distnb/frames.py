"""Stack frames: selection of the frames that a user sees, and detection of frames that must not be interrupted."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TypeVar

from distnb.errors import DistnbError

__all__ = [
    "LOCKING",
    "OWN",
    "SPARED_S",
    "cell_name",
    "chain",
    "frames_of",
    "frames_without",
    "raised_by_distnb",
    "spared",
    "torch_frames",
    "traceback_of",
    "users_folders",
    "with_frames",
    "with_users_paths",
    "within",
]

_F = TypeVar("_F", bound=Callable[..., object])

OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The directory of distnb's own source files."""


def cell_name(filename: str, shell: Any = None) -> str:
    """Return a cell's name in tracebacks, such as "Cell In[3]", from its code's file name; "" for other files."""
    ipython = sys.modules.get("IPython")
    if shell is None and ipython is not None:
        shell = ipython.get_ipython()
    if shell is None:
        return ""
    from distnb.compat.ipython_internals import cell_number

    number = cell_number(shell.compile, filename)
    return f"Cell In[{number}]" if number is not None else ""


users_folders: dict[str, str] = {}
"""The folders of this machine that have copies of the notebook's files, with their paths on the notebook's machine.

Both end with a separator. Tracebacks show the paths on the notebook's machine."""


def with_users_paths(text: str) -> str:
    """Replace the paths of copied files in a text by the paths on the notebook's machine."""
    home = os.path.expanduser("~") + os.sep
    for folder, users in users_folders.items():
        text = text.replace(folder, users)
        if folder.startswith(home):  # IPython shortens these
            text = text.replace(f"~{os.sep}{folder[len(home) :]}", users)
    return text


def _code_objects(*sources: object) -> Iterator[CodeType]:
    """Yield the code objects of functions, of the functions that they define, and of the methods of classes."""
    for source in sources:
        if isinstance(source, FunctionType):
            yield source.__code__
            yield from (each for each in source.__code__.co_consts if isinstance(each, CodeType))
        elif isinstance(source, type):
            yield from _code_objects(*vars(source).values())


def _lock_code_of_import() -> Iterator[object]:
    # the last one: Python >= 3.12
    names = ("_get_module_lock", "_ModuleLock", "_ModuleLockManager", "_BlockingOnManager")
    return (vars(importlib._bootstrap).get(name) for name in names)


LOCKING = frozenset(
    _code_objects(
        threading.Condition.__enter__,
        threading.Condition.__exit__,
        threading.Condition._release_save,  # type: ignore[attr-defined]
        threading.Condition._acquire_restore,  # type: ignore[attr-defined]
        logging.Logger.isEnabledFor,
        logging.Logger.setLevel,
        logging.Manager.getLogger,
        logging.Handler.handle,
        logging.Handler.flush,
        *_lock_code_of_import(),
    )
)
"""Code that has acquired a lock and not recorded it yet, or is about to release one: in `threading.Event`, in
`logging` and in imports.

If a signal handler raises there, the lock stays acquired, and the next notification or import waits forever.
"""


SPARED_S: dict[CodeType, float] = dict.fromkeys(LOCKING, 1.0)
"""Code that must not be interrupted, and the time in seconds that it may take."""


def spared(function: _F) -> _F:
    """Protect a brief function of ours from interruption, which could leave its bookkeeping half done.

    On an engine, orders to end the program wait until the function has returned. A notebook or a script receives SIGINT
    all the same.
    """
    if isinstance(function, FunctionType):
        SPARED_S[function.__code__] = 1.0
    return function


def within(frame: FrameType | None, codes: Collection[CodeType]) -> bool:
    """Return whether a frame or one of its callers runs one of these code objects."""
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def torch_frames(error: BaseException) -> tuple[str, ...]:
    """Return the path prefixes of torch's frames if a traceback should omit them, as for errors of distnb.

    Such an error is about the line in which the user called torch; torch's frames between that line and distnb do not
    help.
    """
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return (os.path.dirname(file) + os.sep,) if file and isinstance(error, DistnbError) else ()


def raised_by_distnb(frame: FrameType) -> bool:
    """Return whether distnb itself raised in a frame: the frame is distnb's and does more than call the user's
    function.

    A frame that only calls the user's function hides itself from debuggers. That function may be a builtin without a
    frame.
    """
    return frame.f_code.co_filename.startswith(OWN) and "__tracebackhide__" not in frame.f_locals


def frames_of(traceback: TracebackType | None) -> list[TracebackType]:
    """Return a traceback's frames, the outermost first."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def frames_without(frames: Sequence[TracebackType], hidden: tuple[str, ...]) -> list[TracebackType]:
    """Return the frames whose files do not begin with one of the hidden paths.

    Frames of `contextlib` that lead to a hidden frame are left out, too. For example, `with strategy.scope():` calls
    distnb through them.
    """
    kept, leads_to_hidden = [], False
    for frame in reversed(frames):
        file = frame.tb_frame.f_code.co_filename
        leads_to_hidden = file.startswith(hidden) or (leads_to_hidden and file == contextlib.__file__)
        if not leads_to_hidden:
            kept.append(frame)
    return kept[::-1]


def traceback_of(frames: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback that consists of these frames."""
    whole: TracebackType | None = None
    for frame in reversed(frames):
        whole = TracebackType(whole, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return whole


def chain(error: BaseException) -> list[BaseException]:
    """Return an error and the errors shown with it: its causes, or those being handled when it was raised."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and all(each is not known for known in found):
        found.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return found


@contextmanager
def with_frames(error: BaseException, chosen: Callable[[BaseException], Sequence[TracebackType]]) -> Iterator[None]:
    """Temporarily replace the tracebacks of an error, and of all errors shown with it, by chosen frames."""
    with ExitStack() as stack:
        for each in chain(error):
            frames = chosen(each)
            stack.callback(each.with_traceback, each.__traceback__)
            each.with_traceback(traceback_of(frames))
        yield
