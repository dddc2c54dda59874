"""The log of a cluster: one file for each process.

Every room logs to `logging.getLogger("distnb.<room>")`. Nothing is written unless DISTNB_LOG names a level, or
`%distnb logs --level` sets one in a running cluster. The files are in the private directory of the process's cluster,
and are removed with it; in DISTNB_LOG_DIR, if that is set, and stay there. A record is one line::

    2026-11-25T22:33:04.123456Z DEBUG    distnb.engine [4711 MainThread] program 7 began: RunCell

The handler takes no lock and keeps neither a buffer nor an open file: a record is one `write` to a file opened for
appending. A signal that ends the running program can therefore interrupt a record at any point without leaving a lock
taken, and a forked process can go on with the same file.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from distnb.errors import OptionError, StartError, closest

__all__ = [
    "LEVELS",
    "LOG_VARIABLE",
    "check_level",
    "close_log",
    "log_environment",
    "log_texts",
    "log_to_stderr",
    "merged",
    "open_log",
    "set_level",
]

LOG_VARIABLE = "DISTNB_LOG"
LEVELS = ("debug", "info", "warning", "error", "off")

_FOLDER_VARIABLE = "DISTNB_LOG_DIR"
_LIMIT_NBYTES = 16 << 20
_OLD = ".old"


def check_level(level: str, given_by: str = LOG_VARIABLE) -> str:
    """Return a level's name in lower case.

    Raises:
        OptionError: There is no such level.
    """
    known = level.strip().lower()
    if known not in LEVELS:
        raise OptionError(
            f"{given_by}={level}: the log has no such level{closest(known, LEVELS)}. The levels are "
            f"{', '.join(LEVELS)}; debug writes the most."
        )
    return known


class _Format(logging.Formatter):
    """Text of one line for each record; the other lines of its message follow, indented."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        where = f"{record.process} {record.threadName}"
        text = record.getMessage()
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        text = text.replace("\n", "\n    ")
        micros = int(record.created % 1 * 1e6)
        return f"{seconds}.{micros:06d}Z {record.levelname:<8} {record.name} [{where}] {text}\n"


class _FileHandler(logging.Handler):
    """Appends each record to a file, without a lock.

    The file is opened for each record: no descriptor is kept that another thread could close, or a forked process
    share. A file that has grown to its limit is renamed to the old one, which it replaces, and a new file begins.

    Args:
        path: The file's; None for standard error.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(_Format())

    def createLock(self) -> None:
        """Make no lock: an aborted program could leave it taken."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record."""
        if self.filter(record):
            self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Format and write a record. It is dropped where the disk is full: that ends no training."""
        try:
            line = self.format(record).encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001  # as every handler of logging: a defect in a log call is shown on stderr
            self.handleError(record)
            return
        with suppress(OSError):
            if self._path is None:
                os.write(2, line)
            else:
                self._append(self._path, line)

    def _append(self, path: Path, line: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line)
            status = os.fstat(descriptor)
            if (
                status.st_size > _LIMIT_NBYTES and os.stat(path).st_ino == status.st_ino
            ):  # no other thread has renamed it
                path.rename(path.with_name(path.name + _OLD))
        finally:
            os.close(descriptor)


class _ProcessLog:
    """The log of this process.

    Attributes:
        directory: The private directory of its cluster; None while there is none.
        process: The name of this process in its file's name: "notebook", "engine-0", "node-agent-1".
        level: The level that was set; "off" for none.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.process = ""
        self.level = "off"
        self._handler: _FileHandler | None = None
        self._before = (logging.NOTSET, True)
        self._lock = threading.Lock()
        self._logger = logging.getLogger("distnb")

    def set(self, level: str) -> None:
        with self._lock:
            self.level = level
            self._detach()
            if level != "off" and self.directory is not None:
                folder, name = _place(self.directory)
                try:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    path = folder / f"{name}{self.process}.log"
                    path.touch(mode=0o600)
                except OSError as error:
                    raise StartError(f"The log cannot be written in {folder}: {error}.") from error
                self._attach(_FileHandler(path), level)

    def to_stderr(self, level: str) -> None:
        with self._lock:
            self._detach()
            if level != "off":
                self._attach(_FileHandler(None), level)

    def _attach(self, handler: _FileHandler, level: str) -> None:
        self._handler = handler
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(handler)
        # The root logger's handlers are the user's, and write to a cell's output.
        self._logger.propagate = False
        self._logger.setLevel(level.upper())

    def _detach(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            self._logger.removeHandler(handler)
            level, self._logger.propagate = self._before
            self._logger.setLevel(level)


def _place(directory: Path) -> tuple[Path, str]:
    """Return the folder of a cluster's log, and the beginning of its files' names."""
    chosen = os.environ.get(_FOLDER_VARIABLE)
    return Path(chosen).expanduser() if chosen else directory / "log", f"{directory.name}-"


_log = _ProcessLog()


def open_log(directory: Path, process: str) -> None:
    """Write this process's records to a file, as DISTNB_LOG says.

    Args:
        directory: The private directory of the process's cluster.
        process: The name of this process in its file's name.

    Raises:
        OptionError: DISTNB_LOG is no level.
        StartError: No file can be written in the log's folder.
    """
    level = check_level(os.environ.get(LOG_VARIABLE) or "off")
    close_log()
    _log.directory, _log.process = directory, process
    _log.set(level)
    logging.getLogger("distnb.process").info("%s is process %d, Python %s", process, os.getpid(), sys.version)


def log_to_stderr() -> None:
    """Write this process's records to standard error, as DISTNB_LOG says: it has no cluster of its own."""
    _log.to_stderr(check_level(os.environ.get(LOG_VARIABLE) or "off"))


def set_level(level: str) -> None:
    """Change the level of this process's log; "off" ends it. Safe from any thread.

    Raises:
        OptionError: There is no such level.
    """
    _log.set(check_level(level, "level"))


def close_log() -> None:
    """Close this process's file: its directory is about to be removed."""
    _log.set("off")
    _log.directory = None


def log_environment() -> dict[str, str]:
    """Return the environment variable that makes a child process log as this one does."""
    return {LOG_VARIABLE: _log.level} if _log.level != "off" or LOG_VARIABLE in os.environ else {}


def log_texts(directory: Path | None = None) -> dict[str, str]:
    """Return the log of each process of a cluster, by the process's name.

    Args:
        directory: The cluster's private directory; None for this process's.
    """
    directory = directory or _log.directory
    if directory is None:
        return {}
    found: dict[str, str] = {}
    folder, name = _place(directory)
    for path in sorted(folder.glob(f"{name}*.log*"), reverse=True):  # an old file comes before the one that follows it
        with suppress(OSError):
            process = path.name.removesuffix(_OLD).removeprefix(name).removesuffix(".log")
            found[process] = found.get(process, "") + path.read_text(errors="replace")
    return dict(sorted(found.items()))


def merged(texts: dict[str, str]) -> list[str]:
    """Return the lines of several processes in the order of their times, each after its process's name.

    Clocks of several machines differ, and with them the order of records that are close together.

    Example:
        >>> for line in merged({"notebook": "10:02 stop\\n", "engine-0": "10:01 begin\\n    of a cell\\n"}):
        ...     print(line)
        engine-0  10:01 begin
        engine-0      of a cell
        notebook  10:02 stop
    """
    width = max(map(len, texts), default=0)
    records: list[tuple[str, str]] = []
    for process, text in texts.items():
        time_of_record = ""
        for line in text.splitlines():
            if not line.startswith(" "):  # a record; its other lines are indented
                time_of_record = line.partition(" ")[0]
            records.append((time_of_record, f"{process:<{width}}  {line}"))
    return [line for _, line in sorted(records, key=lambda record: record[0])]
