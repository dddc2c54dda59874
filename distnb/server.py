"""The command `python -m distnb.server`, or `distnb worker`: a server that waits for notebooks to use this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distnb import features

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, prog: str = "python -m distnb.server") -> int:
    """Run the command line and return the exit code. `arguments` excludes the program's name; None takes the process's
    own.
    """
    code: int = features.require("commands", "worker").run(arguments, prog)
    return code


if __name__ == "__main__":
    sys.exit(main())
