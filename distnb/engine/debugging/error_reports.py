"""Reports of a replica's exceptions, for the notebook and its user."""

from __future__ import annotations

import asyncio.base_events
import pickle
import re
from collections.abc import Callable, Sequence
from traceback import format_exception
from types import TracebackType

import cloudpickle
from IPython.core.getipython import get_ipython

from distnb.compat.ipython_internals import error_drawer
from distnb.engine.namespace import object_operations
from distnb.errors import DistnbError
from distnb.frames import (
    OWN,
    chain,
    frames_of,
    frames_without,
    raised_by_distnb,
    torch_frames,
    with_frames,
    with_users_paths,
)
from distnb.objects.packing import Packed
from distnb.runtime import shared_files
from distnb.wire import exchange
from distnb.wire.messages import ErrorReport

__all__ = ["report", "users_part"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ASKED = (object_operations.__file__, exchange.__file__)
_NO_GPU = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")
_WITHOUT_GPU = (
    "This replica computes on the CPU, since there is no GPU. Leave out .cuda() and device='cuda': tensors made in "
    "strategy.scope() or strategy.run, and the batches of a distributed dataset, are on the replica's device in any "
    "case."
)
_UNKNOWN_CLASS = re.compile(r"Can't get attribute '(\w+)[\w.]*' on <module '__main__'")
_NAME_IT = (
    "A replica has the names that its program reads. If `{name}` is a class or function of the notebook, name it in "
    "the cell, or in the function that unpickles."
)
_SHOWN = 12  # frames at either end of a very long traceback


def report(error: BaseException, pack: Callable[[BaseException], Packed] | None = None) -> ErrorReport:
    """Describe an exception by its pickle, if it can be pickled, and by its traceback as IPython draws it.

    This never raises, although the texts of exceptions are user code, because the notebook waits for the report.

    Args:
        error: The exception.
        pack: Packs it so that its class is the notebook's own; None outside a program and for closures.
    """
    kind = type(error)
    if _wants_a_gpu(error):
        error.add_note(_WITHOUT_GPU)
    if isinstance(error, AttributeError) and (unknown := _UNKNOWN_CLASS.search(str(error))):
        error.add_note(_NAME_IT.format(name=unknown[1]))
    shared_files.explain(error)
    try:
        text, rendered = str(error), tuple(map(with_users_paths, _draw(error)))
    except BaseException as failed:  # noqa: BLE001  # its __str__ may raise anything, and a late order to end may arrive
        text = f"(its text and traceback cannot be shown: {type(failed).__name__})"
        rendered = (f"{kind.__qualname__}: {text}",)
    return ErrorReport(
        pickled=_pickle(error, pack),
        type_name=kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}",
        text=text,
        traceback=tuple(_COLOURS.sub("", line) for line in rendered),
        rendered=rendered,
    )


def _wants_a_gpu(error: BaseException) -> bool:
    """Return whether torch was asked for a missing GPU, and the error has no note about the cure yet."""
    text = str(error) if isinstance(error, (AssertionError, RuntimeError)) else ""
    return any(words in text for words in _NO_GPU) and _WITHOUT_GPU not in getattr(error, "__notes__", ())


def _pickle(error: BaseException, pack: Callable[[BaseException], Packed] | None) -> bytes | Packed | None:
    try:
        if pack is not None:
            return pack(error)
        data = cloudpickle.dumps(error)  # without the traceback, which pickle leaves out
        return data if type(pickle.loads(data)).__name__ == type(error).__name__ else None
    except Exception:  # noqa: BLE001
        return None  # an exception may hold any object, whose pickling may raise; its text and traceback are still sent


def users_part(error: BaseException) -> list[TracebackType]:
    """Return the traceback without distnb's frames, and without torch's if the error is ours.

    An error that is not ours, with only our frames on the stack, is a defect of distnb, and keeps all frames. This does
    not hold for operations that the notebook requested on a user's object, which also run in our frames.
    """
    frames = frames_of(error.__traceback__)
    hidden = (OWN, *torch_frames(error))
    kept = frames_without(frames, hidden)
    if len(kept) > 1 and kept[0].tb_frame.f_code.co_filename == asyncio.base_events.__file__:
        del kept[0]  # the loop in which a cell awaits
    last = frames[-1].tb_frame if frames else None
    asked = last is None or last.f_code.co_filename in _ASKED or not raised_by_distnb(last)
    return kept if kept or isinstance(error, DistnbError) or asked else frames


def _draw(error: BaseException) -> tuple[str, ...]:
    left_out = 0

    def chosen(each: BaseException) -> Sequence[TracebackType]:
        nonlocal left_out
        frames = users_part(each)
        if len(frames) > 2 * _SHOWN:  # IPython needs minutes to draw the thousand frames of an endless recursion
            left_out += len(frames) - 2 * _SHOWN
            frames = [*frames[:_SHOWN], *frames[-_SHOWN:]]
        return frames

    with with_frames(error, chosen):
        lines = _drawn(error)
    return (*lines, f"({left_out:,} frames in the middle are left out.)") if left_out else lines


def _drawn(error: BaseException) -> tuple[str, ...]:
    kind, traceback = type(error), error.__traceback__
    if any(isinstance(each, BaseExceptionGroup) for each in chain(error)):  # IPython cannot draw them
        return tuple(line.rstrip("\n") for line in format_exception(error))
    shell = get_ipython()
    mode = shell.InteractiveTB.mode if shell is not None else "Context"  # the mode of the notebook's %xmode
    return tuple(map(str, error_drawer(error, mode).structured_traceback(kind, error, traceback, tb_offset=0)))
