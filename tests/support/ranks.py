"""Runs of a program on *n* local processes, with the environment that torchrun would set.

The processes have torch loaded already (`tests.support.warm_python`), and are otherwise new.

Example:
    >>> for rank in run_ranks("result = int(os.environ['RANK'])", n=2):
    ...     assert rank.check().result == rank.rank
"""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from tests.support import processes, warm_python
from tests.support.warm_python import Forked

# Ranks must not compete for the cores.
_PROLOGUE = """\
import os, signal, sys
import torch
torch.set_num_threads(1)
"""
_EPILOGUE = """
import cloudpickle as _cloudpickle
with open(os.environ["DISTNB_TEST_RESULT"], "wb") as _file:
    _cloudpickle.dump(globals().get("result"), _file)
"""


@dataclass(frozen=True)
class Rank:
    """The end of one rank."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    result: Any

    def check(self) -> Rank:
        """Return itself if it ended well; otherwise raise an AssertionError with its output."""
        assert self.returncode == 0, f"rank {self.rank} ended with {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


def rank_environment(rank: int, n: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for one machine. The caller serves the store on `port`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(program: str, n: int, *, timeout_s: float = 120.0, env: Mapping[str, str] | None = None) -> list[Rank]:
    """Run `program` as a script on `n` ranks and wait for all of them.

    Args:
        program: The source text (dedented here). Its value of `result` is returned, pickled. `torch`, `os` and `sys`
            are imported already.
        n: The number of ranks.
        timeout_s: The limit, after which an AssertionError shows every rank's stack and output. All ranks are killed.
        env: Variables to add to each rank's environment.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # with port 0 there is no race for a free port
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        script = Path(folder, "program.py")
        script.write_text(_PROLOGUE + textwrap.dedent(program) + _EPILOGUE, encoding="utf-8")
        ranks = [_start(script, rank, n, store.port, dict(env or {})) for rank in range(n)]
        try:
            _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            del store  # the traceback of a failure would keep the listening store alive
        return [_ended(rank, process, Path(folder)) for rank, process in enumerate(ranks)]


def _start(script: Path, rank: int, n: int, port: int, env: dict[str, str]) -> Forked:
    folder = script.parent
    environment = {
        **os.environ,
        **rank_environment(rank, n, port),
        "DISTNB_TEST_RESULT": str(folder / f"result{rank}"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        **env,
    }
    return warm_python.start(script, rank, env=environment, out=folder / f"stdout{rank}", err=folder / f"stderr{rank}")


def _wait(ranks: list[Forked], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline  # read first, because this process may be suspended in between
        alive = [process.pid for process in ranks if process.poll() is None]
        if not alive:
            return
        if late:
            raise AssertionError(
                f"{len(alive)} of {len(ranks)} ranks not done in {timeout_s} s\n" + processes.stacks(alive)
            )
        time.sleep(0.01)


def _ended(rank: int, process: Forked, folder: Path) -> Rank:
    assert process.returncode is not None
    result_path = folder / f"result{rank}"
    result = cloudpickle.loads(result_path.read_bytes()) if result_path.exists() else None
    out = (folder / f"stdout{rank}").read_text(errors="replace")
    err = (folder / f"stderr{rank}").read_text(errors="replace")
    return Rank(rank, process.returncode, out, err, result)
