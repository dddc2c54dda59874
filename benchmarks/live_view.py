"""What the live view costs the training: the same cell with `distnb.live` each step drawn, and not drawn.

    python -m benchmarks.live_view [--rounds 9] [--steps 300]

Both run in a real kernel on 2 engines; "off" is the cell without its `distnb.live` line, after `%distnb live off`.
The target of the project: at most 2 %.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from jupyter_client.manager import KernelManager

from benchmarks.harness import Target, compare, options, report

SETUP = """
%load_ext distnb
%distnb start -n 2
import torch, time, distnb
x, y = torch.randn(4096, 256), torch.randn(4096, 1)
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

begin = time.perf_counter()
for step in range({steps}):
    rows = slice(128 * (step % 32), 128 * (step % 32) + 128)
    losses = strategy.run(train_step, args=(x[rows], y[rows]))
    loss = strategy.reduce("sum", losses, axis=None)
    {live}
seconds = strategy.reduce("mean", strategy.run(lambda: torch.tensor(time.perf_counter() - begin)), axis=None).item()
"""


def main() -> int:
    """Run it. Returns 1 when the target is missed."""
    given = options(__doc__, rounds=9, steps=300)

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

        def measure(live: str, mode: str) -> Callable[[], float]:
            def once() -> float:
                run(f"%distnb live {mode}")
                run(CELL.format(live=live, steps=given.steps))
                seconds = float(run("print(float(seconds))"))
                return seconds / float(given.steps)

            return once

        run(SETUP)
        measures = {"on": measure("distnb.live(loss=loss)", "widget"), "off": measure("pass", "off")}
        comparison = compare(measures, rounds=given.rounds)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()
    target = Target("on", "off", at_most=1.02)
    return 0 if report("a training step, live view on and off", comparison, baseline="off", targets=[target]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
