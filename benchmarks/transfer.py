"""A 100 MB tensor from the notebook to an engine and back, against ipyparallel's push and pull, and a copy in memory.

    python -m benchmarks.transfer [--rounds 7] [--megabytes 100]

distnb: a changed tensor that a cell reads is sent with it (one replica), and `.numpy()` of a handle fetches it. All
contenders also sum the fetched tensor, because the first access to shared memory has a cost. "copy" is a copy into new
memory, which the kernel must provide, as for every message; "memcpy" is a copy into memory that is in use already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ipyparallel
import numpy as np
import torch

from benchmarks.cell_shell import Cells
from benchmarks.guard import TARGETS
from benchmarks.harness import compare, options, report, timed

_COPY = "copy"


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=7, megabytes=100)

    entries = given.megabytes * 1_000_000 // 4
    tensor = torch.rand(entries)
    array, copy = tensor.numpy(), np.empty(entries, dtype=np.float32)

    cells = Cells("distnb")
    cluster = ipyparallel.Cluster(n=1, log_level=logging.ERROR)
    client = cluster.start_and_connect_sync(activate=False)
    try:
        view: Any = client[0]
        cells.run("%distnb start -n 1")
        cells.shell.user_ns["big"] = tensor
        cells.run("%%distribute mirrored\nimport torch\nremote = big.clone()")
        view.push({"big": array}, block=True)

        there = {
            "distnb: a cell reads it": _changed(tensor, lambda: cells.run("%%distribute mirrored\nbig.shape")),
            "ipyparallel push": timed(lambda: view.push({"big": array}, block=True)),
            _COPY: timed(lambda: bytearray(array)),
            "memcpy": timed(lambda: np.copyto(copy, array)),
        }
        sent = compare(there, rounds=given.rounds)
        back = {
            "distnb: handle.numpy()": timed(lambda: cells.value("remote").numpy().sum()),
            "ipyparallel pull": timed(lambda: view.pull("big", block=True).sum()),
            _COPY: timed(lambda: np.frombuffer(bytearray(array), np.float32).sum()),
            "memcpy": timed(lambda: _copy_and_sum(copy, array)),
        }
        fetched = compare(back, rounds=given.rounds)
        cells.run("%distnb stop")
    finally:
        client.close()
        cluster.stop_cluster_sync()
    size, targets = f"{given.megabytes} MB", TARGETS["transfer"]
    met = report(f"{size}, notebook to one engine", sent, baseline=_COPY, targets=targets["there"])
    title = f"{size}, engine to notebook, and summed there"
    return 0 if report(title, fetched, baseline=_COPY, targets=targets["back"]) and met else 1


def _copy_and_sum(into: Any, array: Any) -> None:
    np.copyto(into, array)
    into.sum()


def _changed(tensor: torch.Tensor, call: Callable[[], object]) -> Callable[[], float]:
    """Return a measure of a call after a change of the tensor, which would not be sent otherwise."""

    def measure() -> float:
        tensor.add_(1.0)
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return measure


if __name__ == "__main__":
    raise SystemExit(main())
