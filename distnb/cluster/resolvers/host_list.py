"""Parsers of Slurm's short notations: `n[08-11],m5` for host names, `2(x3),1` for counts per node."""

from __future__ import annotations

import itertools
import math
import re

from distnb.errors import OptionError

__all__ = ["expand_counts", "expand_host_list"]

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MOST = 100_000


def expand_host_list(text: str) -> list[str]:
    """Return all host names of a list in Slurm's notation, in its order.

    Brackets contain numbers and ranges. A name may have several brackets, and text after them. Leading zeros are kept.

    Example:
        >>> expand_host_list("n[08-11],m5,rack[1-2]-gpu[1,3].net")
        ['n08', 'n09', 'n10', 'n11', 'm5', 'rack1-gpu1.net', 'rack1-gpu3.net', 'rack2-gpu1.net', 'rack2-gpu3.net']
    """
    return [host for entry in _entries(text) for host in _expand(entry, text)]


def expand_counts(text: str) -> list[int]:
    """Return the counts of a list such as `2(x3),1`, one number per node.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = _COUNT.fullmatch(entry.strip())
        if match is None:
            raise OptionError(
                f"{entry!r} in the counts {text!r} is neither a number nor a repeated number such as '2(x3)'."
            )
        times = int(match[2]) if match[2] is not None else 1
        if times > _MOST:
            raise OptionError(f"{entry!r} in the counts {text!r} is for more than {_MOST:,} nodes.")
        counts += [int(match[1])] * times
    return counts


def _entries(text: str) -> list[str]:
    """Return the parts between commas outside of brackets."""
    entries, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise OptionError(f"The brackets of the host list {text!r} do not match.")
        if character == "," and not depth:
            entries.append("")
        else:
            entries[-1] += character
    if depth:
        raise OptionError(f"A bracket of the host list {text!r} is not closed.")
    if not all(entry.strip() for entry in entries):
        raise OptionError(f"The host list {text!r} has an empty part.")
    return [entry.strip() for entry in entries]


def _expand(entry: str, text: str) -> list[str]:
    choices = [[match[2]] if match[2] is not None else _numbers(match[1], text) for match in _PIECE.finditer(entry)]
    if math.prod(map(len, choices)) > _MOST:
        raise OptionError(f"{entry!r} in the host list {text!r} is for more than {_MOST:,} hosts.")
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise OptionError(f"'[{inside}]' in the host list {text!r}: {part!r} is neither a number nor a range.")
        first, last = match[1], match[2] if match[2] is not None else match[1]
        if int(last) < int(first):
            raise OptionError(f"'[{inside}]' in the host list {text!r}: the range {part!r} goes backwards.")
        if int(last) - int(first) >= _MOST:
            raise OptionError(f"'[{inside}]' in the host list {text!r}: {part!r} is for more than {_MOST:,} hosts.")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
