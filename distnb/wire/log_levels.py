"""How much is logged, and where to: the part of `logging` that is ambient, so that a cell's text says it once.

Levels travel, and so do handlers of the root logger that write to a standard stream, as `basicConfig` makes them.
Other handlers hold files and connections, which are one process's own.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

__all__ = ["UNCHANGED", "cache", "read", "write"]

cache: dict[Any, Any] = logging.root._cache  # type: ignore[attr-defined]
"""What `logging` clears whenever a level is set: a key of ours in it tells that none was."""
UNCHANGED: Any = object()
"""That key."""


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` or `sys.stdout` is at that moment: each program's output has a place of its own."""

    def __init__(self, stream_name: str) -> None:
        self.stream_name = stream_name
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The stream."""
        found: TextIO = getattr(sys, self.stream_name)
        return found


def _levels() -> dict[str, int]:
    loggers = logging.root.manager.loggerDict.items()
    found = {name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger) and logger.level}
    return {"": logging.root.level, **found}


_levels_at_first = _levels()


def read() -> tuple[Any, ...]:
    """Levels that are not what they were when this process began, by logger, and what is known of the handlers."""
    now = _levels()
    names = sorted(name for name in {**now, **_levels_at_first} if now.get(name, 0) != _levels_at_first.get(name, 0))
    return (
        {name: now.get(name, 0) for name in names},
        logging.root.manager.disable,
        [told for handler in logging.root.handlers if (told := _tell(handler)) is not None],
    )


def _tell(handler: logging.Handler) -> tuple[Any, ...] | None:
    if type(handler) not in (logging.StreamHandler, _StreamHandler) or handler.filters:
        return None
    stream = getattr(handler, "stream", None)
    name = next(
        (name for name in ("stderr", "stdout") if stream in (getattr(sys, name), getattr(sys, f"__{name}__"))), None
    )
    formatter = handler.formatter or logging.Formatter()
    kinds: dict[str, tuple[Any, str]] = dict(logging._STYLES)
    style = next((sign for sign, (kind, _) in kinds.items() if type(formatter._style) is kind), None)
    if name is None or style is None or type(formatter) is not logging.Formatter:
        return None
    return name, handler.level, formatter._fmt, formatter.datefmt, style


def write(value: tuple[Any, ...]) -> None:
    """Log as another process does."""
    levels, disabled, handlers = value
    as_at_first = {name: _levels_at_first.get(name, 0) for name in read()[0] if name not in levels}
    for name, level in {**as_at_first, **levels}.items():
        logging.getLogger(name).setLevel(level)
    logging.disable(disabled)
    present = [told for handler in logging.root.handlers if (told := _tell(handler)) is not None]
    if present == handlers:
        return
    for handler in [each for each in logging.root.handlers if _tell(each) is not None]:
        logging.root.removeHandler(handler)
    for stream, level, text, date, style in handlers:
        handler = _StreamHandler(stream)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(text, date, style))
        logging.root.addHandler(handler)
