"""Looking at objects for the user, who has run nothing: Tab does. What that makes replicas print is not shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_looking", "looking"]

_here = threading.local()


def is_looking() -> bool:
    """Whether this thread is within `looking`."""
    return getattr(_here, "deep", 0) > 0


@contextmanager
def looking() -> Iterator[None]:
    """Programs that this thread sends meanwhile show nothing of what they print."""
    _here.deep = getattr(_here, "deep", 0) + 1
    try:
        yield
    finally:
        _here.deep -= 1
