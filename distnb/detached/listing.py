"""The table of detached clusters, for `%distnb list` and `distnb list`, and `distnb stop`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distnb.command import Command
from distnb.errors import DistnbError
from distnb.views.wording import text_table

if TYPE_CHECKING:
    from distnb.detached.protocol import ClusterSummary

__all__ = ["HEADER", "LIST", "STOP", "rows", "text"]

HEADER = ("name", "engines", "machines", "memory", "age", "ends in", "used by")


def rows() -> list[tuple[str, ...]]:
    """Return a row for each of the user's detached clusters on this machine, the oldest first."""
    from distnb.detached.daemon_client import summaries

    return [_row(summary, time.time()) for summary in summaries()]


def text() -> str:
    """Return the table as text."""
    found = rows()
    if not found:
        return "You have no detached cluster on this machine. In a notebook, %distnb start --detach starts one."
    return "\n".join(text_table(HEADER, found))


def _row(summary: ClusterSummary, now: float) -> tuple[str, ...]:
    ended = f" ({summary.ended} ended)" if summary.ended else ""
    return (
        summary.name,
        f"{summary.engines} on {summary.devices}{ended}",
        summary.hosts or "this one",
        "not known" if summary.rss_nbytes is None else f"{summary.rss_nbytes / 1e9:.1f} GB",
        _duration(now - summary.started),
        "no limit" if summary.ends is None else _duration(max(0.0, summary.ends - now)),
        summary.used_by or "nobody",
    )


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


_LIST_TEXT = """\
Lists your detached clusters on this machine: those that `%distnb start --detach` started, whose engines stay when their
notebook ends. Connect to one in a notebook with `%distnb connect NAME`; end it with `distnb stop NAME`.
"""


def _list(words: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="distnb list", description=_LIST_TEXT).parse_args(words)
    print(text())
    return 0


def _stop(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="distnb stop", description="Ends a detached cluster with its engines.")
    parser.add_argument("name", metavar="NAME", help="the cluster's name, as shown by distnb list")
    name = parser.parse_args(words).name
    from distnb.detached.daemon_client import stop_detached

    try:
        stop_detached(name)
    except DistnbError as error:
        print(f"distnb stop: {error}", file=sys.stderr)
        return 1
    print(f"The cluster {name} has ended.")
    return 0


LIST = Command("list", "list your detached clusters on this machine", _list)
STOP = Command("stop", "end a detached cluster", _stop)
