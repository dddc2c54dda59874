"""The table of detached clusters, for `%distnb list` and `distnb list`, and `distnb stop`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from distnb.command import Command
from distnb.errors import DistnbError
from distnb.views.wording import text_table

__all__ = ["HEADER", "LIST", "STOP", "rows", "text"]

HEADER = ("name", "engines", "machines", "memory", "age", "ends in", "used by")


def rows() -> list[tuple[str, ...]]:
    """Return a row for each of the user's detached clusters on this machine, the oldest first."""
    from distnb.detached import daemon_client

    return daemon_client.rows()


def text() -> str:
    """Return the table as text."""
    found = rows()
    if not found:
        return "You have no detached cluster on this machine. In a notebook, %distnb start --detach starts one."
    return "\n".join(text_table(HEADER, found))


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
