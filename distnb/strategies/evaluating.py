"""What an evaluator does: it waits for the chief's saved weights, evaluates the newest, and logs what came out."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from distnb.errors import ClusterError, ContextError, OptionError
from distnb.runtime.this_process import this_process

__all__ = ["evaluate_checkpoints"]

_LOG = "evaluations.jsonl"
_UNFINISHED = (".tmp", ".part", "~")


@dataclass(frozen=True)
class _Checkpoint:
    """One file or folder as it was found: a name that is written anew is another checkpoint."""

    path: Path
    saved_ns: int

    @property
    def key(self) -> tuple[str, int]:
        """By what the log knows it."""
        return self.path.name, self.saved_ns


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
    """Evaluate each newest checkpoint that appears in a directory, until the last one.

    An evaluator calls it (a process of its own: task type "evaluator" in TF_CONFIG, or any script), while the workers
    train. Checkpoints that were overtaken while it evaluated are left out. What the log has already, after a restart,
    is not evaluated again.

    A checkpoint must appear as a whole: the chief saves under a name that ends in ".tmp", which is left alone here, and
    then gives it its own name by `os.replace`.

    Args:
        directory: Where the chief saves; it may not exist yet.
        evaluate: Called with the path of a checkpoint, a file or a folder. Returns numbers: one, or a dict of them.
        pattern: Which names are checkpoints, as in a shell.
        last: The name of the last one, or a function that tells from its path. None: there is no last one.
        timeout_s: End when none has appeared for so long; None: never.
        log: Where to append one line of JSON for each: "checkpoint", "saved" and "evaluated" (seconds since 1970),
            "seconds" that it took, and "results". None for `evaluations.jsonl` in the directory.
        poll_s: How often to look.

    Returns:
        What was appended to the log.

    Raises:
        ContextError: This process is one of several replicas.
        OptionError: An argument makes no sense, or `evaluate` returned something else than numbers.
        ClusterError: None appeared at all within `timeout_s`.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, f"{folder}/saving.tmp")  # the chief
        ...     os.replace(f"{folder}/saving.tmp", f"{folder}/final.pt")
        ...     lines = evaluate_checkpoints(folder, lambda path: torch.load(path)["w"].sum(), last="final.pt")
        >>> lines[0]["checkpoint"], lines[0]["results"]
        ('final.pt', {'result': 2.0})
    """
    _check(evaluate, pattern, last, timeout_s, poll_s)
    folder = _folder(directory)
    target = Path(log) if log is not None else folder / _LOG
    done = _logged(target)
    lines: list[dict[str, Any]] = []
    if any(_is_last(each.path, last) for each in _checkpoints(folder, pattern) if each.key in done):
        return lines
    for checkpoint in _appearing(folder, pattern, target, done, timeout_s, poll_s):
        ends = _is_last(checkpoint.path, last)  # asked before, since the name may be written anew meanwhile
        line = _evaluate(checkpoint, evaluate)
        if line is not None:
            _append(target, line)
            lines.append(line)
            if ends:
                break
    return lines


def _appearing(
    folder: Path, pattern: str, log: Path, done: set[tuple[str, int]], timeout_s: float | None, poll_s: float
) -> Iterator[_Checkpoint]:
    """The newest checkpoint, each time that there are new ones; until none has appeared for `timeout_s`.

    Raises:
        ClusterError: There is none at all.
    """
    heard = time.monotonic()
    while True:
        found = [each for each in _checkpoints(folder, pattern) if each.path != log]
        new = [each for each in found if each.key not in done]
        if new:
            yield max(new, key=lambda each: (each.saved_ns, each.path.name))
            # Those that it overtook are not evaluated later, when nothing newer has come.
            done.update(each.key for each in new)
            heard = time.monotonic()
        elif timeout_s is not None and time.monotonic() - heard > timeout_s:
            if found:
                return
            raise ClusterError(
                f"No checkpoint appeared in {folder} within {timeout_s:g} s (names like {pattern!r}). Is that "
                "where the chief saves?"
            )
        else:
            time.sleep(poll_s)


def _folder(directory: Any) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise OptionError(f"directory={directory!r}: give the path of the directory where the chief saves.")
    folder = Path(os.fspath(directory))
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"directory={str(folder)!r} is a file: give the directory where the chief saves.")
    return folder


def _check(evaluate: Any, pattern: Any, last: Any, timeout_s: Any, poll_s: Any) -> None:
    if not callable(evaluate):
        raise OptionError(f"evaluate={evaluate!r}: give a function that takes the path of a checkpoint.")
    if last is not None and not isinstance(last, str) and not callable(last):
        raise OptionError(f"last={last!r}: give the name of the last checkpoint, or a function of its path.")
    if not isinstance(pattern, str):
        raise OptionError(f"pattern={pattern!r}: give a pattern of names as in a shell, such as '*.pt'.")
    if timeout_s is not None and not _positive(timeout_s):
        raise OptionError(f"timeout_s={timeout_s!r}: give a positive number of seconds, or None to wait for ever.")
    if not _positive(poll_s):
        raise OptionError(f"poll_s={poll_s!r}: give a positive number of seconds.")
    process = this_process.replica
    if process is not None and process.size > 1:
        raise ContextError(
            f"evaluate_checkpoints was called on replica {process.rank} of {process.size}. An evaluator is a process "
            'of its own: give it the task type "evaluator" in TF_CONFIG, or start it apart.'
        )


def _positive(seconds: Any) -> bool:
    return isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0


def _checkpoints(folder: Path, pattern: str) -> list[_Checkpoint]:
    """What is in the folder now, without hidden and unfinished names."""
    found: list[_Checkpoint] = []
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return found
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith(_UNFINISHED) or not fnmatchcase(entry.name, pattern):
            continue
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue  # deleted meanwhile
        found.append(_Checkpoint(Path(entry.path), status.st_mtime_ns))
    return found


def _is_last(path: Path, last: str | Callable[[Path], bool] | None) -> bool:
    if last is None:
        return False
    return path.name == last if isinstance(last, str) else bool(last(path))


def _evaluate(checkpoint: _Checkpoint, evaluate: Callable[[Path], Any]) -> dict[str, Any] | None:
    """The line for the log; None where the chief deleted the checkpoint before it was read."""
    began = time.time()
    try:
        results = evaluate(checkpoint.path)
    except FileNotFoundError:
        if checkpoint.path.exists():
            raise
        return None
    return {
        "checkpoint": checkpoint.path.name,
        "saved": checkpoint.saved_ns / 1e9,
        "saved_ns": checkpoint.saved_ns,
        "evaluated": began,
        "seconds": time.time() - began,
        "results": _numbers(results),
    }


def _numbers(results: Any) -> dict[str, Any]:
    given = results if isinstance(results, Mapping) else {"result": results}
    return {str(name): _number(name, value) for name, value in given.items()}


def _number(name: object, value: Any) -> float | int | str:
    """A plain number; text for those that JSON does not have ("nan", "inf")."""
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise OptionError(
            f"evaluate returned {name!r}: {value!r}, and numbers are needed: one, or a dict from name to number."
        )
    return value if math.isfinite(value) else str(value)


def _logged(target: Path) -> set[tuple[str, int]]:
    """What earlier runs evaluated. A last line that was cut off counts for nothing."""
    try:
        text = target.read_text(encoding="utf-8")
    except FileNotFoundError:
        return set()
    known: set[tuple[str, int]] = set()
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            known.add((str(entry["checkpoint"]), int(entry["saved_ns"])))
        except (ValueError, KeyError, TypeError):
            continue
    return known


def _append(target: Path, line: Mapping[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a+b") as file:
        # After a line that was cut off by a crash, a new one.
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        cut = bool(size) and file.read(1) != b"\n"
        file.write((b"\n" if cut else b"") + json.dumps(line).encode() + b"\n")
