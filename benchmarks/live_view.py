"""What the live view and the timeline cost the training: the same cell with all of it, and with none.

    python -m benchmarks.live_view [--rounds 25] [--steps 150]

Both run in a real kernel on 2 engines. "off" is the cell without its `distnb.live` line, after `%distnb live off`, on
engines that measure nothing: no waits are recorded and no telemetry is sent. The CPU time is that of the replicas'
processes, with all their threads; the notebook's own is told beside it, in percent of one processor.
The target of the project: at most 1 %, by the clock and by CPU time.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from jupyter_client.manager import KernelManager

from benchmarks.harness import Comparison, Target, compare, options, report

SETUP = """
%load_ext distnb
%distnb start -n 2
import torch, time, distnb
x, y = torch.randn(4096, 256), torch.randn(4096, 1)
"""

MEASURE = """%%distribute mirrored
from distnb import activity
from distnb.engine import control
kept = globals().setdefault("_kept", (activity.begin, activity.end, activity.note_step, activity.latest, 0.2))
nothing = (lambda *a, **k: None,) * 3 + (lambda *a, **k: (), 1e9)
activity.begin, activity.end, activity.note_step, activity.latest, control._TELEMETRY_S = kept if {on} else nothing
"""

# The clock runs on the engines: what is measured is the training, not what the notebook does before and after.
CELL = """%%distribute mirrored
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def train_step(inputs, targets):
    loss = distnb.nn.compute_average_loss((model(inputs) - targets).square().sum(1), global_batch_size=256)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss

for step in range(10):
    strategy.run(train_step, args=(x[:128], y[:128]))
begin, cpu = time.perf_counter(), time.process_time()
for step in range({steps}):
    rows = slice(128 * (step % 32), 128 * (step % 32) + 128)
    losses = strategy.run(train_step, args=(x[rows], y[rows]))
    loss = strategy.reduce("sum", losses, axis=None)
    {live}
spent = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu], dtype=torch.float64)
seconds = strategy.reduce("mean", strategy.run(lambda: spent), axis=None).tolist()
"""


def main() -> int:
    """Run it. Returns 1 when the target is missed."""
    given = options(__doc__, rounds=25, steps=150)

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

            reply = client.execute_interactive(source, output_hook=take, allow_stdin=False, timeout=300)
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"the cell failed: {reply['content']['evalue']}")
            return "".join(shown)

        cpu: dict[str, list[float]] = {"on": [], "off": []}
        notebook: dict[str, list[float]] = {"on": [], "off": []}

        def measure(name: str, live: str, mode: str) -> Callable[[], float]:
            def once() -> float:
                run(f"%distnb live {mode}")
                run(MEASURE.format(on=name == "on"))
                run("cpu_before, clock_before = time.process_time(), time.perf_counter()")
                run(CELL.format(live=live, steps=given.steps))
                own = "(time.process_time() - cpu_before) / (time.perf_counter() - clock_before)"
                clock, spent, here = ast.literal_eval(run(f"print([*seconds, {own}])"))
                cpu[name].append(spent / given.steps)
                notebook[name].append(here)
                return float(clock / given.steps)

            return once

        run(SETUP)
        measures = {"on": measure("on", "distnb.live(loss=loss)", "widget"), "off": measure("off", "pass", "off")}
        by_clock = compare(measures, rounds=given.rounds, warmup=2)
        by_cpu = Comparison({name: tuple(values[2:]) for name, values in cpu.items()})
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()
    target = Target("on", "off", at_most=1.01)
    title = "a training step, live view and timeline on and off"
    kept = report(f"{title}, by the clock", by_clock, baseline="off", targets=[target])
    kept &= report(f"{title}, CPU time of a replica", by_cpu, baseline="off", targets=[target])
    told = {name: f"{statistics.median(values[2:]):.1%}" for name, values in notebook.items()}
    print(f"\nthe notebook's process, of one processor: on {told['on']}, off {told['off']}")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
