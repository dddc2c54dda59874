"""The cost of the live view and the timeline for training: the same steps with and without both, in turns.

    python -m benchmarks.live_view [--rounds 100] [--block-s 0.3] [--width 8192]

One cell in a real kernel trains on 2 engines, and its view is drawn. Each round has a block of steps with `distnb.live`
in each step, and a block without, in which nothing is recorded and no telemetry is sent. The CPU time is that of the
replicas' processes with all their threads. The notebook's own is shown next to it, in percent of one processor. A width
of 8192 makes steps of about 25 ms; one of 512 steps of 2 ms, in which each microsecond counts.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, options, report

SETUP = """
%load_ext distnb
%distnb start -n 2
%distnb live widget
import torch, time, distnb
x, y = torch.randn(4096, 256), torch.randn(4096, 1)
"""

# The clock runs on the engines, so the training is measured without the notebook's work before and after it.
CELL = """%%distribute mirrored
import math
from distnb import activity
from distnb.runtime.this_process import this_process

with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(256, {width}), torch.nn.ReLU(), torch.nn.Linear({width}, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def train_step(inputs, targets):
    loss = distnb.nn.compute_average_loss((model(inputs) - targets).square().sum(1), global_batch_size=256)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss

def block(steps, on):
    begin, cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        rows = slice(128 * (step % 32), 128 * (step % 32) + 128)
        losses = strategy.run(train_step, args=(x[rows], y[rows]))
        loss = strategy.reduce("sum", losses, axis=None)
        if on:
            distnb.live(loss=loss)
    spent = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu], dtype=torch.float64) / steps
    return strategy.reduce("mean", strategy.run(lambda: spent), axis=None).tolist()

control = this_process.live_sink.__self__
names = ("begin", "end", "collective_started", "note_step")
recording = [getattr(activity, name) for name in names]

def switch(on):
    for name, function in zip(names, recording):
        setattr(activity, name, function if on else lambda *args, **more: None)
    control._next_sample = 0.0 if on else math.inf

block(20, True)
steps = math.ceil({block_s} / block(20, True)[0])
measured = [[], []]
try:
    for number in range(2 * {rounds}):
        on = number % 4 in (0, 3)
        switch(on)
        measured[on].append(block(steps, on))
finally:
    switch(True)
del control, recording
measured = tuple(tuple(each) for part in measured for each in part)
"""


def main() -> int:
    """Run the benchmark. Return 1 if the target is missed."""
    given = options(__doc__, rounds=100, block_s=0.3, width=8192)

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(Path(__file__).parents[1]))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)

        def run(source: str) -> str:
            shown: list[str] = []

            def take(message: dict[str, object]) -> None:
                content = message["content"]
                assert isinstance(content, dict)
                if message["msg_type"] == "stream":
                    shown.append(content["text"])
                elif message["msg_type"] == "error":
                    sys.stderr.write(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"])) + "\n")

            reply = client.execute_interactive(source, output_hook=take, allow_stdin=False, timeout=3600)
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"the cell failed: {reply['content']['evalue']}")
            return "".join(shown)

        run(SETUP)
        run("cpu_before, clock_before = time.process_time(), time.perf_counter()")
        run(CELL.format(rounds=given.rounds, block_s=given.block_s, width=given.width))
        own = run("print((time.process_time() - cpu_before) / (time.perf_counter() - clock_before))")
        measured = ast.literal_eval(run("print(measured)"))
        off, on = measured[: given.rounds], measured[given.rounds :]
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()
    kept = [
        _report(
            f"a training step, live view and timeline on and off, {what}",
            [each[place] for each in on],
            [each[place] for each in off],
        )
        for place, what in enumerate(("by the clock", "CPU time of a replica"))
    ]
    print(f"\nthe notebook's process takes {float(own):.1%} of one processor")
    return 0 if all(kept) else 1


def _report(title: str, on: list[Any], off: list[Any]) -> bool:
    comparison = Comparison({"on": tuple(on), "off": tuple(off)})
    return report(title, comparison, baseline="off", targets=TARGETS["live_view"]["step"])


if __name__ == "__main__":
    raise SystemExit(main())
