"""Arrays on memory-mapped files: they travel as the file's name, and are mapped again where they arrive.

What is written to a shared mapping is in the file, so nothing of it is compared or sent. A copy-on-write mapping (mode
"c") has content of its own, and is sent by value as other arrays are.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

from distnb.objects.placeholder import Placeholder

__all__ = [
    "MappedFile",
    "file_of",
    "identity_of",
    "is_same_window",
    "open_mapped_file",
    "open_mapped_view",
    "window_of",
]

_REOPENED = {"r": "r", "r+": "r+", "w+": "r+"}


class MappedFile(NamedTuple):
    """A file that `numpy.memmap` has mapped.

    Attributes:
        path: Absolute.
        mode: "r" or "r+".
        dtype, offset, shape, order: The arguments of `numpy.memmap`.
    """

    path: str
    mode: str
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    order: str


def file_of(array: Any) -> tuple[MappedFile, Any] | None:
    """Return the file that an array lies in, and the memmap that it is a view of, or is.

    None if its memory is no file's, or is a file's that has no name any more.
    """
    import numpy

    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    if not isinstance(root.base, mmap.mmap):
        return None
    path, mode = getattr(root, "filename", None), _REOPENED.get(getattr(root, "mode", None) or "")
    if path is None or mode is None or not os.path.exists(path):
        return None
    order = "F" if root.flags.f_contiguous and not root.flags.c_contiguous else "C"
    return MappedFile(
        path=str(path), mode=mode, dtype=root.dtype, offset=root.offset, shape=root.shape, order=order
    ), root


def is_same_window(one: Any, other: Any) -> bool:
    """Return whether two arrays are the same window on the same file."""
    files = [found[0] for each in (one, other) if (found := file_of(each)) is not None]
    return len(files) == 2 and files[0] == files[1] and window_of(one) == window_of(other)


def window_of(array: Any) -> tuple[Any, ...]:
    """Return what part of its file an array shows: dtype, shape, strides, and where in the mapping it begins."""
    import numpy

    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    first, start = (each.__array_interface__["data"][0] for each in (array, root))
    return array.dtype, array.shape, array.strides, first - start


def identity_of(path: str) -> tuple[int, int, int, int]:
    """Return device, inode, size in bytes, and time of the last change of a file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_mapped_file(file: MappedFile, identity: tuple[int, int, int, int]) -> Any:
    """Map a file here; a placeholder where there is none of its name, or another one.

    It is the same file if it is the same inode, or, on another machine, if it has the same size and time.
    """
    import numpy

    try:
        here = identity_of(file.path)
        if here[:2] != identity[:2] and here[2:] != identity[2:]:
            raise OSError("the one of this name is another: size or time differ")
        mode: Any = file.mode
        order: Any = file.order
        return numpy.memmap(file.path, file.dtype, mode, file.offset, file.shape, order)
    except (OSError, ValueError) as error:
        return Placeholder(
            f"The memory-mapped file {file.path} cannot be used on this machine ({error}). The cure: copy it there "
            "under the same name, with its time, or send what it holds: numpy.array(...) of the array."
        )


def open_mapped_view(root: Any, window: tuple[Any, ...], kind: type, writeable: bool) -> Any:
    """Make a view of a mapped file, an array or a memmap; of a placeholder nothing else."""
    if type(root) is Placeholder:
        return root
    import numpy

    dtype, shape, strides, offset = window
    view: Any = numpy.ndarray.__new__(kind, shape, dtype, root, offset, strides)
    if kind is numpy.memmap:
        view.__array_finalize__(root)  # so it knows its file
    view.flags.writeable = writeable
    return view
