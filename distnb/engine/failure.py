"""An exception of a replica, made ready to travel and to be read."""

from __future__ import annotations

import asyncio.base_events
import os
import pickle
import types
from typing import Any

import cloudpickle
import torch.distributed
from IPython.core.ultratb import AutoFormattedTB, SyntaxTB

import distnb
from distnb.errors import DistnbError
from distnb.wire.messages import ErrorReport

__all__ = ["report"]

_TORCH_DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep
_OWN = os.path.dirname(os.path.abspath(distnb.__file__)) + os.sep


def report(error: BaseException) -> ErrorReport:
    """Describe an exception: itself where it can be pickled, and its traceback as IPython draws it."""
    traceback = _users_part(error)
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
    try:
        data = cloudpickle.dumps(error)  # without its traceback: pickle leaves that out
        return data if type(pickle.loads(data)).__name__ == type(error).__name__ else None
    except Exception:  # noqa: BLE001
        return None  # an exception may hold anything, and fail in any way; its text and traceback still travel


def _users_part(error: BaseException) -> types.TracebackType | None:
    """The traceback without frames of distnb, except where nothing else would be left.

    An error of ours is about the user's line, so torch's way from there to us is left out too.
    """
    frames = []
    each = error.__traceback__
    while each is not None:
        frames.append(each)
        each = each.tb_next
    hidden = (_OWN, _TORCH_DISTRIBUTED) if isinstance(error, DistnbError) else (_OWN,)
    kept = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(hidden)]
    if len(kept) > 1 and kept[0].tb_frame.f_code.co_filename == asyncio.base_events.__file__:
        del kept[0]  # the loop in which a cell awaits
    rebuilt: types.TracebackType | None = None
    for frame in reversed(kept):
        rebuilt = types.TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt if rebuilt is not None else error.__traceback__


def _draw(error: BaseException, traceback: types.TracebackType | None, theme: str) -> tuple[str, ...]:
    drawer: Any = AutoFormattedTB(mode="Context", theme_name=theme)
    if isinstance(error, SyntaxError):
        drawer = SyntaxTB(theme_name=theme)
    return tuple(str(line) for line in drawer.structured_traceback(type(error), error, traceback, tb_offset=0))
