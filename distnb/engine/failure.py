"""An exception of a replica, made ready to travel and to be read."""

from __future__ import annotations

import os
import pickle
import types

import cloudpickle
from IPython.core.ultratb import AutoFormattedTB, SyntaxTB

import distnb
from distnb.wire.messages import ErrorReport

__all__ = ["report"]

_OWN = os.path.dirname(os.path.abspath(distnb.__file__)) + os.sep


def report(error: BaseException) -> ErrorReport:
    """Describe an exception: itself where it can be pickled, and its traceback as IPython draws it."""
    traceback = _users_part(error.__traceback__)
    kind = type(error)
    return ErrorReport(
        pickled=_pickle(error),
        type_name=kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}",
        text=str(error),
        traceback=_draw(error, traceback, "nocolor"),
        rendered=_draw(error, traceback, "neutral"),
    )


def _pickle(error: BaseException) -> bytes | None:
    bare = error.with_traceback(None)
    try:
        data = cloudpickle.dumps(bare)
        return data if type(pickle.loads(data)).__name__ == type(error).__name__ else None
    except Exception:  # noqa: BLE001
        return None  # an exception may hold anything, and fail in any way; its text and traceback still travel


def _users_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without frames of distnb, except where nothing else would be left."""
    frames = []
    each = traceback
    while each is not None:
        frames.append(each)
        each = each.tb_next
    kept = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(_OWN)]
    rebuilt: types.TracebackType | None = None
    for frame in reversed(kept):
        rebuilt = types.TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt if rebuilt is not None else traceback


def _draw(error: BaseException, traceback: types.TracebackType | None, theme: str) -> tuple[str, ...]:
    kind = SyntaxTB if isinstance(error, SyntaxError) else AutoFormattedTB
    drawer = kind(theme_name=theme) if kind is SyntaxTB else AutoFormattedTB(mode="Context", theme_name=theme)
    return tuple(str(line) for line in drawer.structured_traceback(type(error), error, traceback, tb_offset=0))
