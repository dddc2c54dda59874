"""The explanation of errors that occur when all replicas write the same file."""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError

from distnb.runtime.this_process import this_process

__all__ = ["explain"]

_HALF_READ = (
    "Ran out of input",
    "PytorchStreamReader failed",
    "unable to open file",
    "Unable to synchronously open file",
)


def explain(error: BaseException) -> None:
    """Add a note to a file error if it may be caused by several replicas running the same code. Never raises."""
    process = this_process.replica
    if process is None or process.size == 1:
        return
    if met := _met_another(error):
        met += (
            " Let one replica write while the others wait: distnb.on_chief(write)(path). Or put it into an ordinary "
            "cell, outside the scope."
        )
    elif process.rank and isinstance(error, FileNotFoundError) and _is_temporary(error.filename):
        met = (
            "each made its own temporary folder, but only replica 0 writes the files of callbacks and model.save. "
            "Use one folder on all replicas: distnb.shared_folder()."
        )
    else:
        return
    note = f"All {process.size} replicas run this code, in strategy.scope() too, and {met}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _met_another(error: BaseException) -> str:
    """Return a description of the interference by another replica that may explain an error, or "" if none does."""
    if isinstance(error, FileExistsError):
        return "another replica has already made this file or folder."
    if isinstance(error, FileNotFoundError):
        # The file exists by now, so another replica was about to make it. A wrong path would still not exist.
        return "another replica has made it in the meantime." if _is_there(error.filename) else ""
    half_read = isinstance(error, (zipfile.BadZipFile, UnpicklingError, JSONDecodeError)) or (
        isinstance(error, (EOFError, RuntimeError, OSError)) and any(text in str(error) for text in _HALF_READ)
    )
    return "this replica has read a file that another one is still writing." if half_read else ""


def _is_there(path: object) -> bool:
    return isinstance(path, (str, bytes, os.PathLike)) and os.path.exists(path)


def _is_temporary(path: object) -> bool:
    """Return whether a path is in a folder whose name `tempfile.mkdtemp()` has chosen."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    root, made = Path(tempfile.gettempdir()), Path(path).absolute()
    parts = made.relative_to(root).parts if made.is_relative_to(root) else ()
    return len(parts) > 1 and re.fullmatch(r"tmp\w{8}", parts[0]) is not None
