"""The memory of a class: notebooks on one server, each with two engines, after the quick start.

    python -m benchmarks.classroom [--notebooks 30] [--kernel distnb] [--epochs 15]

Each notebook is a kernel of its own, in which the cells of `notebooks/quickstart.ipynb` run, in all at the same time,
but the last, which ends the engines. Then the memory of all processes is added up as the kernel's "proportional set
size": memory that several processes share counts in equal parts. `--kernel distnb` is the kernel that `distnb kernel`
installs, and `python3` the usual one. There is no peer, so these figures are no ratios.

The target of the project is 30 notebooks in 6 GB. With torch 2.13, on two cores with other programs, 30 of them took
5.9 GB with one epoch: the kernels 2.4, the engines 3.2, other processes 0.3.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from benchmarks.harness import options
from distnb.kernels.kernel_spec import specification

_QUICK_START = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"
_PATIENCE_S = 3600.0
_RESERVE_NBYTES = 2 << 30


def _cells(epochs: int) -> list[str]:
    """Return the code cells of the quick start, without the one that ends the engines."""
    cells = json.loads(_QUICK_START.read_text())["cells"]
    *found, last = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert last == "%distnb stop"
    return [source.replace("EPOCHS = 15", f"EPOCHS = {epochs}") for source in found]


class _Notebook:
    """A kernel and its client."""

    def __init__(self, kernel: str) -> None:
        self.manager: Any = KernelManager(kernel_name=kernel)
        self.manager.start_kernel(cwd=str(_QUICK_START.parent))
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=_PATIENCE_S)
        self.pid: int = vars(self.manager.provisioner)["pid"]

    def run(self, source: str) -> None:
        """Run a cell. Raise RuntimeError if it fails."""
        reply = self.client.execute_interactive(source, timeout=_PATIENCE_S, output_hook=lambda message: None)
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{source}\n{reply['content'].get('evalue')}")

    def end(self) -> None:
        """End the kernel, and its engines with it."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _memory(notebooks: list[_Notebook]) -> Counter[str]:
    """Return the memory of all processes that this one has started, by their kind."""
    kernels = {notebook.pid for notebook in notebooks}
    found: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        parent = process.ppid()
        kind = "engines" if process.num_threads() > 1 else "other processes"
        if process.pid in kernels:
            kind = "kernels"
        elif parent == os.getpid():
            kind = "the process that they were forked from"
        found[kind] += _pss(process.pid)
    return found


def main() -> None:
    """Run the benchmark."""
    found = options(__doc__, notebooks=30, kernel="distnb", epochs=15)
    began, notebooks = time.perf_counter(), list[_Notebook]()
    with tempfile.TemporaryDirectory() as folder:
        specifications = Path(folder, "kernels", "distnb")
        specifications.mkdir(parents=True)
        (specifications / "kernel.json").write_text(json.dumps(specification()))
        os.environ["JUPYTER_PATH"] = folder
        try:
            for number in range(found.notebooks):
                if psutil.virtual_memory().available < _RESERVE_NBYTES:
                    sys.exit(f"Too little memory is left after {number} notebooks.")
                notebooks.append(_Notebook(found.kernel))
            print(f"{found.notebooks} kernels after {time.perf_counter() - began:.0f} s", flush=True)
            with ThreadPoolExecutor(found.notebooks) as pool:
                for source in _cells(found.epochs):
                    list(pool.map(lambda notebook, source=source: notebook.run(source), notebooks))
                    print(f"{source.splitlines()[0]!r} after {time.perf_counter() - began:.0f} s", flush=True)
            memory = _memory(notebooks)
            for kind, nbytes in memory.most_common():
                print(f"{kind:<42}{nbytes / 1e6:>8,.0f} MB")
            total = memory.total()
            print(f"{'together':<42}{total / 1e6:>8,.0f} MB, {total / 1e6 / found.notebooks:.0f} MB a notebook")
            notebooks[0].run("%distnb status")  # all of them still work
        finally:
            for notebook in notebooks:
                notebook.end()


if __name__ == "__main__":
    main()
