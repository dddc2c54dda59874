"""An evaluator's loop: wait for the chief's checkpoints, evaluate the newest, and log the results."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distnb.errors import ClusterError, ContextError, OptionError
from distnb.runtime.this_process import this_process

__all__ = ["evaluate_checkpoints"]

_logger = logging.getLogger("distnb.checkpoint")

_LOG = "evaluations.jsonl"
_UNFINISHED = (".tmp", ".part", "~")

_Key = tuple[str, int]
"""A checkpoint's name and its time of saving in ns. A name that is written again is another checkpoint."""


def evaluate_checkpoints(
    directory: str | os.PathLike[str],
    evaluate: Callable[[Path], Any],
    *,
    pattern: str = "*",
    last: str | Callable[[Path], bool] | None = None,
    timeout_s: float | None = None,
    log: str | os.PathLike[str] | None = None,
    poll_s: float = 1.0,
) -> list[dict[str, Any]]:
    """Evaluate the newest checkpoint whenever one appears in a directory, until the last one.

    An evaluator calls it while the workers train. The evaluator is a process of its own: the task type "evaluator" in
    TF_CONFIG, or any script. Checkpoints that a newer one overtook during an evaluation are skipped. After a restart,
    those already in the log are not evaluated again. A checkpoint must appear as a whole, as a `distnb.Checkpoint`
    does. Otherwise the chief saves under a name that ends in ".tmp", which is ignored, and then renames it by
    `os.replace`. Archives, such as Keras's `.keras` and torch's `.pt`, are ignored until they are complete, if each has
    its own name.

    Args:
        directory: The directory where the chief saves. It need not exist yet.
        evaluate: A function that is called with the path of a checkpoint, a file or a folder. It returns a number or a
            dict of numbers.
        pattern: The pattern of the checkpoints' names, as in a shell.
        last: The name of the last checkpoint, or a function that returns True for its path. None: there is no last one.
        timeout_s: End when no checkpoint has appeared for this time; None: never.
        log: The file to which one line of JSON is appended for each checkpoint: "checkpoint", "saved" and "evaluated"
            (seconds since 1970), "seconds" of the evaluation, and "results". None for `evaluations.jsonl` in the
            directory.
        poll_s: The time between two checks of the directory.

    Returns:
        The lines that were appended to the log.

    Raises:
        ContextError: This process is one of several replicas.
        OptionError: An argument is invalid, or `evaluate` returned something other than numbers.
        ClusterError: No checkpoint appeared within `timeout_s`.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, f"{folder}/saving.tmp")  # the chief
        ...     os.replace(f"{folder}/saving.tmp", f"{folder}/final.pt")
        ...     lines = evaluate_checkpoints(folder, lambda path: torch.load(path)["w"].sum(), last="final.pt")
        >>> lines[0]["checkpoint"], lines[0]["results"]
        ('final.pt', {'result': 2.0})
    """
    _check(directory, evaluate, pattern, last, timeout_s, poll_s)
    folder = Path(directory)
    target = Path(log) if log is not None else folder / _LOG
    done = _logged(target)
    lines: list[dict[str, Any]] = []

    def is_last(path: Path) -> bool:
        return path.name == last if isinstance(last, str) else last is not None and last(path)

    ended = any(is_last(path) for key, path in _checkpoints(folder, pattern, target).items() if key in done)
    last_seen = time.monotonic()
    while not ended:
        found = _checkpoints(folder, pattern, target)
        new = found.keys() - done
        if not new:
            if timeout_s is None or time.monotonic() - last_seen <= timeout_s:
                time.sleep(poll_s)
                continue
            if found:
                break
            raise ClusterError(
                f"No checkpoint appeared in {folder} within {timeout_s:g} s (names like {pattern!r}). Does the "
                "chief save there?"
            )
        newest = max(new, key=lambda key: key[::-1])
        _logger.info("evaluates %s, skips %d older checkpoints", found[newest], len(new) - 1)
        done |= new  # overtaken checkpoints are not evaluated later, either
        is_end = is_last(found[newest])  # asked before the evaluation, during which the name may be written again
        line = _evaluated(evaluate, found[newest], newest)
        if line is not None:
            _append(target, line)
            lines.append(line)
            ended = is_end
        last_seen = time.monotonic()
    return lines


def _evaluated(evaluate: Callable[[Path], Any], path: Path, key: _Key) -> dict[str, Any] | None:
    """Return the log's line for a checkpoint, or None if the chief deleted it before it was read."""
    began = time.time()
    try:
        results = _numbers(evaluate(path))
    except FileNotFoundError:
        if path.exists():
            raise
        return None
    line = {"checkpoint": key[0], "saved": key[1] / 1e9, "saved_ns": key[1], "evaluated": began}
    return line | {"seconds": time.time() - began, "results": results}


def _check(directory: Any, evaluate: Any, pattern: Any, last: Any, timeout_s: Any, poll_s: Any) -> None:
    def is_time(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0

    def require(fits: bool, message: str) -> None:
        if not fits:
            raise OptionError(message)

    seconds = "give a positive number of seconds (timeout_s=None waits forever)."
    is_folder = isinstance(directory, (str, os.PathLike)) and not Path(directory).is_file()
    is_last = last is None or isinstance(last, str) or callable(last)
    require(is_folder, f"directory={directory!r}: give the path of the directory where the chief saves.")
    require(callable(evaluate), f"evaluate={evaluate!r}: give a function that takes the path of a checkpoint.")
    require(is_last, f"last={last!r}: give the name of the last checkpoint, or a function of its path.")
    require(isinstance(pattern, str), f"pattern={pattern!r}: give a pattern of names as in a shell, such as '*.pt'.")
    require(timeout_s is None or is_time(timeout_s), f"timeout_s={timeout_s!r}: {seconds}")
    require(is_time(poll_s), f"poll_s={poll_s!r}: {seconds}")
    process = this_process.replica
    if process is not None and process.size > 1:
        raise ContextError(
            f"evaluate_checkpoints was called on replica {process.rank} of {process.size}. An evaluator is a "
            'separate process: give it the task type "evaluator" in TF_CONFIG, or start it separately.'
        )


def _checkpoints(folder: Path, pattern: str, log: Path) -> dict[_Key, Path]:
    """Return the complete checkpoints in the folder, without hidden and unfinished ones, by name and time."""
    found = {}
    for path in folder.glob(pattern):
        if not path.name.startswith(".") and not path.name.endswith(_UNFINISHED) and path != log:
            with suppress(FileNotFoundError):  # deleted in the meantime
                if _is_whole(path):
                    found[path.name, path.stat().st_mtime_ns] = path
    return found


def _is_whole(path: Path) -> bool:
    """Return whether a file is complete. Empty files are not. A ZIP archive is once it has its directory, which comes
    last.
    """
    if path.is_dir():
        return True
    with path.open("rb") as file:
        begins = file.read(4)
    return begins != b"" and (begins != b"PK\x03\x04" or zipfile.is_zipfile(path))


def _numbers(results: Any) -> dict[str, float | int | str]:
    """Return plain numbers by name. Values that JSON lacks ("nan", "inf") become text."""
    numbers: dict[str, float | int | str] = {}
    for name, value in (results if isinstance(results, Mapping) else {"result": results}).items():
        if callable(getattr(value, "item", None)) and getattr(value, "shape", None) in ((), (1,)):
            value = value.item()
        if not isinstance(value, (int, float)):
            raise OptionError(f"evaluate returned {name!r}: {value!r}. Return a number, or a dict from name to number.")
        numbers[str(name)] = value if math.isfinite(value) else str(value)
    return numbers


def _logged(target: Path) -> set[_Key]:
    """Return the checkpoints that earlier runs evaluated. An incomplete last line is ignored."""
    known: set[_Key] = set()
    for line in target.read_text(encoding="utf-8").splitlines() if target.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            known.add((str(entry["checkpoint"]), int(entry["saved_ns"])))
    return known


def _append(target: Path, line: Mapping[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # a program was killed while it wrote its line
    cut = target.exists() and target.read_bytes()[-1:] not in (b"", b"\n")
    with target.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(line) + "\n")
