"""Where in the user's program a collective was called."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Final

import torch

import distnb

__all__ = ["CallSite", "current"]

_PACKAGE: Final = os.path.dirname(distnb.__file__) + os.sep
_ENGINE: Final = os.path.join(_PACKAGE, "engine") + os.sep
_LIBRARIES: Final = tuple(
    {
        os.path.join(path, "")
        for path in (
            os.path.dirname(torch.__file__),
            *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        )
    }
)
_MAX_FRAMES: Final = 60
_MAX_LINES: Final = 6

_USER, _LIBRARY, _BOUNDARY = range(3)


@dataclass(frozen=True)
class CallSite:
    """A line of the user's program, with the lines that called it.

    Attributes:
        identity: 16 bytes, of which the first half is equal on two replicas if the innermost line is, and the second
            half if the lines that called it are too.
        text: The innermost line, for people: `train.py, line 12`.
    """

    identity: bytes
    text: str


NOWHERE = CallSite(bytes(16), "a place without Python code")
_kinds: dict[int, tuple[int, CodeType]] = {}
_sites: dict[tuple[int, ...], CallSite] = {}


def _classify(code: CodeType) -> int:
    name = code.co_filename
    if name.startswith(_ENGINE):
        kind = _BOUNDARY
    elif name.startswith((_PACKAGE, "<frozen", *_LIBRARIES)) or name == "<string>":
        kind = _LIBRARY
    else:
        kind = _USER
    # The code object is kept: its id would otherwise be given to another one.
    _kinds[id(code)] = (kind, code)
    return kind


def current() -> CallSite:
    """The user's lines that led to this call, the innermost first; frames of libraries are left out."""
    frame: FrameType | None = sys._getframe(1)
    key: list[int] = []
    kinds = _kinds
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        known = kinds.get(id(code))
        kind = known[0] if known is not None else _classify(code)
        if kind == _USER:
            key.append(id(code))
            key.append(frame.f_lasti)
            if len(key) == 2 * _MAX_LINES:
                break
        elif kind == _BOUNDARY:
            break
        frame = frame.f_back
    if not key:
        return NOWHERE
    found = _sites.get(tuple(key))
    return found if found is not None else _describe(tuple(key))


def _describe(key: tuple[int, ...]) -> CallSite:
    lines = []
    for known, instruction in zip(key[::2], key[1::2], strict=True):
        code = _kinds[known][1]
        lines.append((code.co_filename, _line(code, instruction)))
    name, number = lines[0]
    # Replicas of one script can be started from different folders, but run the same files.
    chain = [f"{os.path.basename(file)}:{line}" for file, line in lines]
    short = os.path.basename(name) if os.path.sep in name and not name.startswith("<") else name
    identity = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (chain[0], "|".join(chain)))
    site = CallSite(identity, f"{short}, line {number}")
    _sites[key] = site
    return site


def _line(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
