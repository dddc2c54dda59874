"""The log of a process: silent by default, one file, no lock, nothing raised into a program."""

from __future__ import annotations

import io
import logging
import logging.config
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distnb import process_log
from distnb.engine.guard import Guard
from distnb.errors import OptionError, ProgramAborted, StartError

_logger = logging.getLogger("distnb.test")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    process_log.close_log()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of this process's log, at level debug."""
    monkeypatch.setenv("DISTNB_LOG", "debug")
    directory = tmp_path / "distnb-1"
    directory.mkdir()
    process_log.open_log(directory, "notebook")
    return directory / "log" / "distnb-1-notebook.log"


def test_a_library_that_imports_distnb_is_silent() -> None:
    program = (
        "import distnb, logging; logging.getLogger('distnb.x').error('no'); print('torch' in __import__('sys').modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_without_a_level_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTNB_LOG", raising=False)
    process_log.open_log(tmp_path, "notebook")
    _logger.error("lost")
    assert list(tmp_path.iterdir()) == []
    assert not _logger.isEnabledFor(logging.INFO)
    process_log.set_level("info")
    _logger.info("found")
    assert "found" in process_log.log_texts()["notebook"]
    assert process_log.log_environment() == {"DISTNB_LOG": "info"}
    process_log.set_level("off")
    _logger.error("lost again")
    assert "lost" not in process_log.log_texts()["notebook"]
    assert process_log.log_environment() == {}


def test_an_unknown_level_names_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_LOG", "verbos")
    with pytest.raises(OptionError, match=r"DISTNB_LOG=verbos: .* debug, info, warning, error, off"):
        process_log.open_log(tmp_path, "notebook")
    with pytest.raises(OptionError, match="level=loud"):
        process_log.set_level("loud")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISTNB_LOG", "info")
    monkeypatch.setenv("DISTNB_LOG_DIR", str(tmp_path / "file"))
    with pytest.raises(StartError, match="file"):
        process_log.open_log(tmp_path, "notebook")


def test_the_chosen_folder_separates_the_files_of_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_LOG", "info")
    monkeypatch.setenv("DISTNB_LOG_DIR", str(tmp_path / "logs"))
    for name in ("distnb-1", "distnb-2"):
        process_log.open_log(tmp_path / name, "notebook")
        _logger.info("of %s", name)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "distnb-1-notebook.log", "distnb-2-notebook.log",
    ]  # fmt: skip
    assert "of distnb-1" in process_log.log_texts(tmp_path / "distnb-1")["notebook"]
    assert "of distnb-1" not in process_log.log_texts(tmp_path / "distnb-2")["notebook"]


def test_records_are_lines_whose_continuations_are_indented(log: Path) -> None:
    _logger.warning("two\nlines of %s", "one record")
    try:
        raise ValueError("the reason")
    except ValueError:
        _logger.exception("it failed")
    lines = log.read_text().splitlines()
    assert lines[1].endswith("] two")
    assert lines[2] == "    lines of one record"
    assert lines[-1] == "    ValueError: the reason"
    assert "WARNING  distnb.test" in lines[1]
    assert oct(log.stat().st_mode & 0o777) == "0o600"


def test_the_users_handlers_and_levels_are_unchanged(log: Path) -> None:
    distnb, shown = logging.getLogger("distnb"), io.StringIO()
    users = logging.StreamHandler(shown)
    logging.getLogger().addHandler(users)
    try:
        _logger.error("for the file")
        process_log.close_log()
        _logger.error("for the user")
        assert shown.getvalue() == "for the user\n"
        distnb.setLevel(logging.ERROR)
        process_log.open_log(log.parents[1], "notebook")
        process_log.close_log()
        assert distnb.level == logging.ERROR
    finally:
        distnb.setLevel(logging.NOTSET)
        logging.getLogger().removeHandler(users)


def test_configuring_logging_does_not_end_the_log(log: Path) -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    _logger.info("still there")
    assert "still there" in log.read_text()


def test_a_record_that_cannot_be_written_is_dropped(log: Path) -> None:
    log.unlink()
    log.parent.rmdir()
    _logger.error("not read")


def test_a_long_log_keeps_its_latest_part(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "_LIMIT_NBYTES", 2000)
    for number in range(200):
        _logger.info("record %d.", number)
    kept = process_log.log_texts()["notebook"]
    assert "record 199." in kept
    assert "record 0." not in kept
    assert len(kept) < 5000
    assert kept.splitlines() == sorted(kept.splitlines())


def test_a_forked_process_writes_to_the_same_file_whatever_other_threads_do(log: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            _logger.debug("of the thread")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(20):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                _logger.info("of child %d.", number)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
    text = log.read_text()
    assert all(f"of child {number}." in text for number in range(20))
    assert all(line.startswith("20") for line in text.splitlines()), "records are whole lines"


def test_a_program_aborted_in_a_record_leaves_no_lock_held(log: Path) -> None:
    guard = Guard()

    class Lock:
        """The lock of a user's handler. The order to end comes when the program has just taken it."""

        def __init__(self) -> None:
            self._lock = threading.RLock()

        def acquire(self) -> None:
            self._lock.acquire()
            if threading.current_thread() is threading.main_thread():
                guard.abort(1, "another replica failed")
                guard.press()

        def release(self, *error: object) -> None:
            self._lock.release()

        __enter__, __exit__ = acquire, release  # which `logging` calls since Python 3.13

    def program() -> None:
        while True:
            _logger.debug("of the program")
            guard.press()  # repeatedly, as the control thread does

    users = logging.StreamHandler(io.StringIO())
    users.lock = Lock()  # type: ignore[assignment]
    logging.getLogger("distnb").addHandler(users)
    try:
        with pytest.raises(ProgramAborted):
            guard.call(1, program)
        other = threading.Thread(target=_logger.debug, args=("of another thread",), daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive()
    finally:
        logging.getLogger("distnb").removeHandler(users)
    assert "of another thread" in log.read_text()
