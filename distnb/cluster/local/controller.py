"""`python -m distnb.cluster.local.controller PID …`: ipyparallel's controller, ended with the notebook."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from distnb.cluster.local.orphans import die_with

__all__ = ["main"]


def main(notebook_pid: int, arguments: list[str]) -> None:
    """Run the controller, with ipyparallel's own command line, until it is told to end, or the notebook is gone."""
    os.umask(0o077)  # its connection files hold the key
    die_with(notebook_pid)
    from ipyparallel.controller.app import IPController

    class Controller(IPController):  # type: ignore[misc]
        def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
            """Let the file appear whole: whoever waits for it reads it the moment that it is there."""
            path = Path(self.profile_dir.security_dir, fname)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(cdict, indent=2))
            part.replace(path)

        def construct_url(self, kind: str, channel: str, index: object = None) -> str:
            """Of a UNIX socket: ipyparallel binds it as `path-number`, and its clients connect to `path:number`."""
            path, _, number = super().construct_url(kind, channel, index).rpartition("-")
            return f"{path}:{number}"

    Controller.launch_instance(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
