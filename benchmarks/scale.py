"""The notebook's cost for each replica, from a few replicas to a thousand: cells, calls, output and telemetry.

    python -m benchmarks.scale [--replicas 4,16,64,256,1000] [--rounds 5] [--seconds 5] [--local] [--threads]

A real kernel with the widgets runs cells on simulated engines (`benchmarks.simulated_engines`), which speak the real
protocol without torch. The figures are processor time that the kernel's process spends in all of its threads, without
that of an ordinary cell: in ms with the smallest number of replicas, and in µs for each further replica. The simulated
engines share this machine's processors with the kernel, so wall-clock times would be those of the simulation.
"""

from __future__ import annotations

import ast
import os
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, options, report

SETUP = """
%load_ext distnb
import threading, distnb
from benchmarks.simulated_engines.launcher import replace_engines
_restore = replace_engines(remote={remote})
%distnb live widget
def _step(): return Tensor(0.5)
"""
CELLS = {
    "an empty cell": "%%distribute mirrored\npass",
    "a cell that assigns 4 values": "%%distribute mirrored\na = 1; b = 2.5; c = 'text'; d = (1, 2)",
    "a cell that assigns a list and a dict": "%%distribute mirrored\nrows = [0.5, 0.25]; table = {'a': [1, 2]}",
    "a cell that prints one line": "%%distribute mirrored\nprint('hello')",
    "a cell that prints a line of its own": "%%distribute mirrored\nprint('hello from', replica)",
    "one call of `strategy.run`": "_strategy.run(_step);",
}
VALUE = "import os; blob = os.urandom(1_000_000)"
READING = "%%distribute mirrored\nsize = len(blob)"
CALLS = "for _ in range(20): _strategy.run(_step)"
TRAINING = """%%distribute mirrored
for i in range({steps}):
    await step(0.05)
    live(loss=replica + 1 / (i + 1))
    if i % 20 == 0: print('epoch', i // 20)
"""
FAILURE = "%%distribute mirrored\nif replica == 1: raise ValueError('a failure')\nawait sleep(600)"


class Kernel:
    """A Jupyter kernel whose processor time is measured from outside."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(Path(__file__).parents[1]))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        provisioner: Any = self._manager.provisioner
        self.pid = int(provisioner.process.pid)
        self._names: dict[int, str] = {}
        self.shown_nbytes = 0

    def run(self, source: str, *, fails: bool = False) -> str:
        """Run a cell, and return its text output."""
        texts: list[str] = []

        def receive(message: dict[str, Any]) -> None:
            content = message["content"]
            self.shown_nbytes += len(repr(content)) + sum(memoryview(each).nbytes for each in message["buffers"])
            if message["msg_type"] == "stream":
                texts.append(content["text"])
            elif message["msg_type"] == "error" and not fails:
                sys.stderr.write(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"])) + "\n")

        self.shown_nbytes = 0
        reply = self._client.execute_interactive(source, output_hook=receive, allow_stdin=False, timeout=3600)
        if (reply["content"]["status"] != "ok") != fails:
            raise RuntimeError(f"the cell ended unexpectedly: {reply['content']}")
        return "".join(texts)

    def name_threads(self) -> None:
        """Learn the names of the kernel's threads."""
        names = self.run("print({each.native_id: each.name for each in threading.enumerate()})")
        self._names = ast.literal_eval(names)

    def seconds(self) -> dict[str, float]:
        """Return the processor time of each thread so far, by name."""
        found: defaultdict[str, float] = defaultdict(float)
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                nanoseconds = int((thread / "schedstat").read_text().split()[0])
                name = self._names.get(int(thread.name)) or (thread / "comm").read_text().strip()
            except OSError:
                continue  # it has ended
            found[name] += nanoseconds / 1e9
        return dict(found)

    def measure(self, source: str, *, fails: bool = False) -> dict[str, float]:
        """Run a cell, and return the processor time that each thread spent."""
        before = self.seconds()
        self.run(source, fails=fails)
        return {name: max(0.0, s - before.get(name, 0.0)) for name, s in self.seconds().items()}

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()


class Measurements:
    """The figures of one number of replicas.

    Attributes:
        total: The kernel's processor time in seconds, by what was measured.
        sizes: Other figures, in words.
        threads: The same times by thread.
    """

    def __init__(self, replicas: int, *, remote: bool, rounds: int, seconds: float) -> None:
        self._replicas, self._rounds, self._seconds = replicas, rounds, seconds
        self.total: dict[str, float] = {}
        self.sizes: dict[str, str] = {}
        self.threads: dict[str, dict[str, float]] = {}
        self._kernel = Kernel()
        try:
            self._run(remote)
        finally:
            self._kernel.close()

    def _run(self, remote: bool) -> None:
        kernel = self._kernel
        kernel.run(SETUP.format(remote=remote))
        kernel.run("import torch.distributed")  # as part of the start, it would hide the engines' part
        self._note("starting an engine", kernel.measure(f"%distnb start -n {self._replicas}"))
        kernel.run("_strategy = distnb.MirroredStrategy()")
        for source in (*CELLS.values(), TRAINING.format(steps=20)):
            kernel.run(source)  # once, since the first of each imports modules
        kernel.name_threads()
        ordinary = [kernel.measure("pass") for _ in range(self._rounds)]
        base = statistics.median(sum(each.values()) for each in ordinary)
        for what, source in CELLS.items():
            self._note(what, *(kernel.measure(source) for _ in range(self._rounds)), base=base)
        self._note("20 calls in one cell, each", kernel.measure(CALLS), base=base, times=20)
        reading = []
        for _ in range(min(3, self._rounds)):
            kernel.run(VALUE)
            reading.append(kernel.measure(READING))
        self._note("a cell that receives 1 MB from the notebook", *reading, base=base)
        training = TRAINING.format(steps=int(self._seconds / 0.05))
        self._note("a second of training at 20 steps a second", kernel.measure(training), times=self._seconds)
        self.sizes["sent to the page, kB a second of training"] = f"{kernel.shown_nbytes / 1e3 / self._seconds:,.0f}"
        self._note("a cell that fails on one replica", kernel.measure(FAILURE, fails=True), base=base)
        stuck = kernel.run("print(len(distnb.notebook.compose.require().stuck))").strip()
        self.sizes["replicas that did not end in time after it"] = stuck
        self._note("`distnb.timeline()`", kernel.measure("_timeline = distnb.timeline()"), base=base)
        self._note("`%distnb status`", kernel.measure("%distnb status"), base=base)
        self.sizes["open files"] = str(len(os.listdir(f"/proc/{kernel.pid}/fd")))
        self.sizes["memory, MB"] = re.findall(r"VmRSS:\s*(\d+)", Path(f"/proc/{kernel.pid}/status").read_text())[0][:-3]
        kernel.run("%distnb stop")

    def _note(self, what: str, *rounds: dict[str, float], base: float = 0.0, times: float = 1.0) -> None:
        total = statistics.median(sum(each.values()) for each in rounds)
        self.total[what] = max(0.0, total - base) / times
        typical = min(rounds, key=lambda each: abs(sum(each.values()) - total))
        self.threads[what] = {name: s / times for name, s in typical.items() if s > 0.02 * total}


def _table(title: str, columns: dict[int, dict[str, str]]) -> None:
    names = list(next(iter(columns.values())))
    width = max(map(len, names))
    print(f"\n{title}")
    print(f"  {'replicas':<{width}}" + "".join(f"{size:>10,}" for size in columns))
    for name in names:
        print(f"  {name:<{width}}" + "".join(f"{column[name]:>10}" for column in columns.values()))


def main() -> int:
    """Run the benchmark. Return 1 if the target is missed."""
    given = options(__doc__, replicas="4,16,64,256,1000", rounds=5, seconds=5.0, local=False, threads=False)
    by_size: dict[int, Measurements] = {}
    for size in map(int, given.replicas.split(",")):
        by_size[size] = Measurements(size, remote=not given.local, rounds=given.rounds, seconds=given.seconds)
        print(f"{size} replicas were measured", file=sys.stderr, flush=True)
        if given.threads:
            for what, threads in by_size[size].threads.items():
                print(f"  {what}: " + ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in threads.items()))
    least, first = next(iter(by_size.items()))
    further = {
        size: {what: (s - first.total[what]) / (size - least) for what, s in found.total.items()}
        for size, found in by_size.items()
        if size > least
    }
    where = "on this machine" if given.local else "on other machines, 8 on each"
    columns = {least: {what: f"{s * 1e3:,.1f} ms" for what, s in first.total.items()}}
    columns |= {size: {what: f"{s * 1e6:,.0f} µs" for what, s in each.items()} for size, each in further.items()}
    _table(f"the kernel's processor time with {least} replicas, and for each further one, {where}", columns)
    _table("other figures", {size: found.sizes for size, found in by_size.items()})
    worst = max((each[what] for each in further.values() for what in CELLS), default=0.0)
    cost = Comparison({"a further replica": (worst,), "a millisecond": (1e-3,)})
    return 0 if report("a cell", cost, baseline="a millisecond", targets=TARGETS["scale"]["cell"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
