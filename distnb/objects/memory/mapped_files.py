"""Arrays on memory-mapped files: the sender sends the file's name, and the receiver maps the file again.

Writes to a shared mapping are in the file, so its content is neither compared nor sent. A copy-on-write mapping (mode
"c") has content of its own, and is sent by value like other arrays.
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
        path: The absolute path.
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
    """Return the mapped file of an array, and the memmap that the array is, or is a view of.

    Return None if the array is not on a mapped file, or if the file no longer has a name.
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
    """Return an array's window on its file: dtype, shape, strides, and offset in the mapping in bytes."""
    import numpy

    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    first, start = (each.__array_interface__["data"][0] for each in (array, root))
    return array.dtype, array.shape, array.strides, first - start


def identity_of(path: str) -> tuple[int, int, int, int]:
    """Return a file's device, inode, size in bytes, and time of the last change in ns."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_mapped_file(file: MappedFile, identity: tuple[int, int, int, int]) -> Any:
    """Map a file on this machine. Return a placeholder if the file is missing or is another one.

    A file is the same if it has the same inode or, on another machine, the same size and time.
    """
    import numpy

    try:
        here = identity_of(file.path)
        if here[:2] != identity[:2] and here[2:] != identity[2:]:
            raise OSError("the file of this name is another one: size or time differ")
        mode: Any = file.mode
        order: Any = file.order
        return numpy.memmap(file.path, file.dtype, mode, file.offset, file.shape, order)
    except (OSError, ValueError) as error:
        return Placeholder(
            f"The memory-mapped file {file.path} cannot be used on this machine ({error}). The cure: copy the file "
            "here under the same name, with its time, or send its content: numpy.array(...) of the array."
        )


def open_mapped_view(root: Any, window: tuple[Any, ...], kind: type, writeable: bool) -> Any:
    """Return a view of a mapped file as an array or a memmap. Return a placeholder as it is."""
    if type(root) is Placeholder:
        return root
    import numpy

    dtype, shape, strides, offset = window
    view: Any = numpy.ndarray.__new__(kind, shape, dtype, root, offset, strides)
    if kind is numpy.memmap:
        view.__array_finalize__(root)  # copies the attributes that describe the file
    view.flags.writeable = writeable
    return view
