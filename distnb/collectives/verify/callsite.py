"""Where in the user's program a collective was called."""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Final

import torch

import distnb
from distnb.collectives.gradients.backward_passes import name_of
from distnb.collectives.verify import wording

__all__ = ["IDENTITY_NBYTES", "CallSite", "current", "find", "words_of"]

IDENTITY_NBYTES: Final = 32

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
        identity: Four times 8 bytes, equal on two replicas if: the innermost line is; the lines that called it are
            too; what the innermost call is about, as it is written, is; that of its callers is too. The last two are
            zeros where the source is not at hand.
        text: The innermost line, for people: `train.py, line 12`.
        words: The innermost call as it is written.
        file: The innermost line's file, as the code object names it.
        line: Its number.
    """

    identity: bytes
    text: str
    words: str = ""
    file: str = ""
    line: int = 0


NOWHERE = CallSite(bytes(IDENTITY_NBYTES), "a place without Python code")
_kinds: dict[int, tuple[int, CodeType]] = {}
_sites: dict[tuple[int, ...], CallSite] = {}
_by_identity: dict[bytes, CallSite] = {NOWHERE.identity: NOWHERE}


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


def find(identity: bytes) -> CallSite:
    """The call site of this process with that identity."""
    return _by_identity.get(identity, NOWHERE)


def words_of(identity: bytes, place: str) -> str:
    """A call of another replica as it is written in this one's source; empty if it is not there, or another one is.

    Args:
        identity: As in `CallSite`.
        place: Its text there.
    """
    known = _by_identity.get(identity)
    return known.words if known is not None else _words_at(identity[16:24], place)


@functools.lru_cache(maxsize=1000)
def _words_at(about: bytes, place: str) -> str:
    name, _, line = place.rpartition(", line ")
    files = {code.co_filename for kind, code in list(_kinds.values()) if kind == _USER}
    for file in (each for each in files if name_of(each) == name and line.isdigit()):
        for text in wording.calls_at("".join(linecache.getlines(file)), int(line)):
            if _digest([wording.subject(text)]) == about:
                return text
    return ""


def _describe(key: tuple[int, ...]) -> CallSite:
    frames = [(_kinds[known][1], instruction) for known, instruction in zip(key[::2], key[1::2], strict=True)]
    lines = [(code.co_filename, _line(code, instruction)) for code, instruction in frames]
    # Replicas of one script can be started from different folders, but run the same files.
    chain = [f"{os.path.basename(file)}:{line}" for file, line in lines]
    texts = [wording.words(code, instruction) for code, instruction in frames]
    about = [wording.subject(text) if text is not None else None for text in texts]
    identity = _digest(chain[:1]) + _digest(chain) + _digest(about[:1]) + _digest(about)
    file, line = lines[0]
    site = CallSite(identity, f"{name_of(file)}, line {line}", texts[0] or "", file, line)
    _sites[key] = _by_identity[identity] = site
    return site


def _digest(parts: Sequence[str | None]) -> bytes:
    if None in parts:
        return bytes(8)
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()


def _line(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
