"""`python -m distnb.cluster.local.script_replica PID DIRECTORY RANK PIPE …`: one replica of `distnb run …`."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from distnb.cluster.local.orphans import die_with
from distnb.cluster.process_environment import STORE_VARIABLE, keep_temporary_sockets_in
from distnb.cluster.rendezvous_store import use_rendezvous_files
from distnb.process_log import open_log

__all__ = ["error_path", "main", "run"]

_OURS = (__file__, "<frozen runpy>", runpy.__file__)


def error_path(directory: Path, rank: int) -> Path:
    """Return the file to which a failed replica writes its traceback and the time of the failure."""
    return directory / f"error-{rank}.json"


def main(arguments: list[str]) -> None:
    """Run the script as Python would, until the script or the launcher ends."""
    launcher, directory, rank, reports, *command = arguments
    os.set_inheritable(int(reports), False)
    die_with(int(launcher))
    keep_temporary_sockets_in(Path(directory))
    open_log(Path(directory), f"replica-{rank}")
    if os.environ.get(STORE_VARIABLE):
        use_rendezvous_files(os.environ[STORE_VARIABLE])
    try:
        run(command)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BaseException as error:  # noqa: BLE001  # shown as by Python, without our frames
        text = "".join(traceback.format_exception(error.with_traceback(_from_script(error.__traceback__))))
        error_path(Path(directory), int(rank)).write_text(json.dumps({"time": time.time(), "traceback": text}))
        sys.stdout.flush()
        print(text, end="", file=sys.stderr, flush=True)
        os.write(int(reports), f"{rank}\n".encode())
        sys.last_value = error  # as the interpreter does, so that exit handlers can see the failure
        raise SystemExit(1) from None


def run(command: list[str]) -> None:
    """Run `SCRIPT ARGUMENT…` or `-m MODULE ARGUMENT…` in this process as `__main__`."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


def _from_script(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first frame on, or the whole traceback if the script never began."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename in _OURS:
        first = first.tb_next
    return first


if __name__ == "__main__":
    main(sys.argv[1:])
