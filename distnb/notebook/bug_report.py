"""The logs of a cluster's processes, as text or as an archive for a bug report."""

from __future__ import annotations

import platform
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from distnb.errors import OptionError
from distnb.features import every
from distnb.process_log import merged

if TYPE_CHECKING:
    from distnb.notebook.session import Session

__all__ = ["log_text", "save"]

_OUTPUT_LINES = 10_000
_LIBRARIES = ("distnb", "torch", "numpy", "ipython", "ipykernel", "ipyparallel", "pyzmq", "cloudpickle", "torchmetrics")


def log_text(session: Session, engine: int | None, lines: int) -> str:
    """Return the latest lines of the logs of all processes, in order of time, or of one engine's log.

    The text is "" if no process of the cluster logs.
    """
    texts = session.engines.log_texts()
    if engine is not None:
        texts = {process: text for process, text in texts.items() if process.rpartition("-")[2] == str(engine)}
    found = merged(texts)
    left_out = f" (the last {lines:,} of {len(found):,} lines)" if len(found) > lines else ""
    return "\n".join([f"── log{left_out} ──", *found[-lines:], ""]) if found else ""


def save(session: Session, path: Path) -> int:
    """Write the data for a bug report to a zip file, and return the number of files in it.

    The archive holds the output of engines outside programs, the log of each process, the stories of the state
    machines, the list of engines, and the versions of libraries. The private directory also has secrets, so no other
    file of it is read.

    Raises:
        OptionError: The file cannot be written.
    """
    files = dict(_files(session))
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    except OSError as error:
        raise OptionError(f"%distnb logs --save {path}: the file cannot be written: {error}.") from error
    return len(files)


def _files(session: Session) -> Iterator[tuple[str, str]]:
    yield "versions.txt", "\n".join(_versions()) + "\n"
    yield "engines.txt", "\n".join(map(str, session.status())) + "\n"
    yield "stories/supervision.txt", "\n".join(map(str, session.engines.supervisor.story)) + "\n"
    for stories in every("stories"):
        for name, story in stories().items():
            yield f"stories/{name}.txt", "\n".join(map(str, story)) + "\n"
    for engine, text in session.logs(_OUTPUT_LINES).items():
        yield f"output/engine-{engine}.log", text
    for process, text in session.engines.log_texts().items():
        yield f"log/{process}.log", text


def _versions() -> Iterator[str]:
    yield f"Python {sys.version}"
    yield platform.platform()
    for library in _LIBRARIES:
        try:
            yield f"{library} {metadata.version(library)}"
        except metadata.PackageNotFoundError:
            yield f"{library} is not installed"
