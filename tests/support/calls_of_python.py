"""Counts of the calls of Python functions: the cost of an operation, exactly and on any machine."""

from __future__ import annotations

from typing import Any

__all__ = ["COUNT_ON_ENGINES", "CallCount"]


class CallCount:
    """A function for `sys.setprofile` that counts calls.

    Keras's own are left out. If an earlier test of this process has loaded Keras, its settings are compared, too.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call" and "keras" not in frame.f_code.co_filename


COUNT_ON_ENGINES = """
def begin():
    import builtins, sys
    builtins.profiled = [0]
    def count(frame, event, argument):
        builtins.profiled[0] += event == 'call' and 'keras' not in frame.f_code.co_filename
    sys.setprofile(count)
def end():
    import builtins, sys
    sys.setprofile(None)
    return builtins.profiled[0]
"""
"""Functions to be run on engines: `begin` counts from now on, and `end` returns the count."""
