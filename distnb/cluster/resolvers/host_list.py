"""Parsers of Slurm's short notations: `n[08-11],m5` for host names, `2(x3),1` for counts per node."""

from __future__ import annotations

import itertools
import re

from distnb.errors import OptionError

__all__ = ["expand_counts", "expand_host_list"]

_ENTRY = re.compile(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_COUNT = re.compile(r"(\d+)(?:\(x(\d{1,5})\))?")


def expand_host_list(text: str) -> list[str]:
    """Return all host names of a list in Slurm's notation, in its order.

    Brackets contain numbers and ranges. A name may have several brackets, and text after them. Leading zeros are kept.

    Example:
        >>> expand_host_list("n[08-11],m5,rack[1-2]-gpu[1,3].net")
        ['n08', 'n09', 'n10', 'n11', 'm5', 'rack1-gpu1.net', 'rack1-gpu3.net', 'rack2-gpu1.net', 'rack2-gpu3.net']
    """
    hosts: list[str] = []
    for entry in _entries(_ENTRY, text):
        pieces = [_numbers(inside) if inside else [name] for inside, name in _PIECE.findall(entry[0])]
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the counts of a list such as `2(x3),1`, one number per node.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    return [int(entry[1]) for entry in _entries(_COUNT, text) for _ in range(int(entry[2] or 1))]


def _entries(form: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the parts between commas outside of brackets, each of which has this form."""
    entries = list(form.finditer(text))
    if not text or ",".join(entry[0] for entry in entries) != text:
        raise OptionError(f"{text!r} is not a list in Slurm's notation, such as 'n[08-11],m5' or '2(x3),1'.")
    return entries


def _numbers(inside: str) -> list[str]:
    """Return the numbers of a bracket, such as "08-11,15"."""
    numbers: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
