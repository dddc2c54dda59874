"""Tested versions of the libraries whose private names distnb uses, and the check of imports of such names."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from distnb.errors import LibraryVersionError

__all__ = ["TESTED", "private_names"]

TESTED: Final = {
    "IPython": ("7.34", "9"),
    "accelerate": ("1.2", "1"),
    "cloudpickle": ("3", "3.1"),
    "keras": ("3.13", "3.16"),
    "matplotlib": ("3.9", "3"),
    "pandas": ("3", "3"),
    "torch": ("2.11", "2.15"),
    "torchmetrics": ("1.6", "1"),
    "transformers": ("4.46", "5"),
}
"""The first and the last tested version by library. A last version "9" means every 9.x."""


@contextmanager
def private_names(library: str) -> Iterator[None]:
    """Check the version of a library in a block that imports its private names.

    Warn if the version is newer than the last tested one.

    Raises:
        LibraryVersionError: The version is older than the first tested one, or lacks the name.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        if library not in sys.modules:
            raise  # the library is not installed
        _check(library)
        raise LibraryVersionError(
            f"distnb uses a name of {library} that {_version(library)} does not have ({error}). {_cure(library)}"
        ) from error
    _check(library)


def _check(library: str) -> None:
    found = _version(library)
    first, last = TESTED[library]
    if _numbers(found) < _numbers(first):
        raise LibraryVersionError(
            f"distnb needs {library} {first} or newer, and {found} is installed. {_cure(library)}"
        )
    if _numbers(found)[: len(_numbers(last))] > _numbers(last):
        warnings.warn(
            f"{library} {found} is newer than {last}, the last version that this distnb is tested with. If something "
            f"fails: {_cure(library)}",
            stacklevel=2,
        )


def _version(library: str) -> str:
    return str(sys.modules[library].__version__)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release's numbers: (2, 11, 0) of "2.11.0+cu130"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(each) for each in found[0].split(".")) if found else ()


def _cure(library: str) -> str:
    first, last = TESTED[library]
    *before, final = _numbers(last)
    above = ".".join(str(each) for each in (*before, final + 1))
    return f"Install a tested version (pip install '{library}>={first},<{above}') or a newer distnb."
