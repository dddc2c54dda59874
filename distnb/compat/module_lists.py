"""The loaded modules, as IPython and ipykernel list them when a shell starts, in memory that forked processes share.

A forked process copies each page that it writes to, and Python writes to an object to count a reference. So a loop over
thousands of modules copies the pages of all their names, files and dictionaries: 12 MB in each process.
"""

from __future__ import annotations

import sys
from typing import Any

import ipykernel.ipkernel

__all__ = ["compact"]


class _Module:
    """A module, as a kernel sees it that looks for the files in which its debugger does not stop."""

    __slots__ = ("__file__",)

    def __init__(self, file: str) -> None:
        self.__file__ = file


class _System:
    """The module `sys`, as ipykernel's kernel sees it."""

    def __init__(self) -> None:
        files = [getattr(module, "__file__", None) for module in sys.modules.values()]
        self.modules = {number: _Module(_copy(file)) for number, file in enumerate(files) if isinstance(file, str)}

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def compact() -> None:
    """Copy the names and files of the loaded modules into adjacent memory, once, before the process is forked."""
    if isinstance(ipykernel.ipkernel.sys, _System):
        return
    for name in list(sys.modules):
        sys.modules[_copy(name)] = sys.modules.pop(name)
    ipykernel.ipkernel.sys = _System()  # type: ignore[assignment]


def _copy(text: str) -> str:
    return text.encode().decode()
