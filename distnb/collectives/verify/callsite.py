"""Call sites: the lines of the user's program that led to a collective or another call of distnb."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

from distnb.collectives.digests import digest_of_text
from distnb.frames import OWN, cell_name

__all__ = ["CallSite", "current", "find"]

_ENGINE: Final = os.path.join(OWN, "engine") + os.sep
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
        identity: Four digests of 8 bytes each: of the innermost line; of that line and the lines that called it; of the
            innermost line's text; and of that text and the texts of the lines that called it.
        place: The innermost line, for people: `train.py, line 12`.
        text: The source of that line.
        file: The innermost line's file, as in its code object.
        line: Its number.
    """

    identity: bytes
    place: str
    text: str = ""
    file: str = "distnb"
    line: int = 0

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.text else self.place

    def warn(self, text: str) -> None:
        """Issue a warning that is attributed to that line."""
        warnings.warn_explicit(text, UserWarning, self.file, self.line)


NOWHERE = CallSite(identity=bytes(32), place="a place without Python code")
_kinds: dict[int, tuple[int, CodeType]] = {}
_sites: dict[tuple[int, ...], CallSite] = {}
_by_identity: dict[bytes, CallSite] = {NOWHERE.identity: NOWHERE}


def _classify(code: CodeType) -> int:
    name = code.co_filename
    if name.startswith(_ENGINE):
        kind = _BOUNDARY
    elif name.startswith((OWN, "<frozen", *_LIBRARIES)) or name == "<string>":
        kind = _LIBRARY
    else:
        kind = _USER
    # The code object is kept, because another one could otherwise get its id.
    _kinds[id(code)] = (kind, code)
    return kind


def current(depth: int = 1) -> CallSite:
    """Return the user's lines that led to this call, the innermost first, without frames of libraries.

    The search begins `depth` frames above this function. It ends at the engine's frames, which call the user's code.
    """
    frame: FrameType | None = sys._getframe(depth)
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


def find(identity: bytes) -> CallSite:
    """Return the call site of this process with that identity."""
    return _by_identity.get(identity, NOWHERE)


def _describe(key: tuple[int, ...]) -> CallSite:
    frames = [(_kinds[known][1], instruction) for known, instruction in zip(key[::2], key[1::2], strict=True)]
    lines = [(code.co_filename, _line(code, instruction)) for code, instruction in frames]
    # The replicas of a script run the same files, and may have been started from different folders.
    chain = [f"{os.path.basename(file)}:{line}" for file, line in lines]
    texts = [linecache.getline(file, line).strip() for file, line in lines]
    file, line = lines[0]
    identity = b"".join(map(_digest, (chain[:1], chain, texts[:1], texts)))
    site = CallSite(identity=identity, place=f"{_name_of(file)}, line {line}", text=texts[0], file=file, line=line)
    _sites[key] = _by_identity[identity] = site
    return site


def _digest(parts: Sequence[str]) -> bytes:
    return digest_of_text("|".join(parts)).to_bytes(8, "little")


def _line(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def _name_of(filename: str) -> str:
    """Return a file's name for people: a cell is named by its number if IPython has it."""
    return cell_name(filename) or Path(filename).name
