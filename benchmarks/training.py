"""Training steps per second: distnb against torchrun + DistributedDataParallel, 2 replicas on the CPU over Gloo.

    python -m benchmarks.training [--sets 3] [--rounds 5] [--steps 40] [--models mlp,deep,convnet,normed] [--no-cell]

Four contenders take turns, each with two processes of its own: DistributedDataParallel with the environment that
torchrun sets; a script with `MirroredStrategy`, likewise; a `%%distribute mirrored` cell; and the floor, two processes
that train alone and do not communicate at all. All run one thread per process, the same model, batch and optimizer. The
target of the project: at least 1.0× DistributedDataParallel's
steps per second, in each model.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.cell_shell import Cells
from benchmarks.harness import Comparison, Target, compare, report
from benchmarks.training_models import MODELS

REPLICAS = 2
FLOOR = "no communication"


class Ranks:
    """The processes of one contender, with torchrun's environment.

    Args:
        contender: "ddp", "distnb" or "alone".
        worker: The module that they run; it answers to lines `WHAT HOW_OFTEN` with seconds.
        replicas: How many processes.
    """

    def __init__(self, contender: str, worker: str = "benchmarks.training_worker", replicas: int = REPLICAS) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", worker, contender],
                env={
                    **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(replicas),
                    "LOCAL_WORLD_SIZE": str(replicas), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(replicas)
        ]  # fmt: skip

    def step(self, model: str, steps: int) -> float:
        """Seconds per step of a model (or of whatever the worker knows), of the slowest replica."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{model} {steps}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(float(process.stdout.readline() or "nan"))
        return max(answers)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@functools.cache
def _cells() -> Cells:
    return Cells("distnb")


class Cell:
    """A `%%distribute mirrored` cell on 2 engines."""

    def __init__(self) -> None:
        self._cells = _cells()
        self._cells.run(f"%distnb start -n {REPLICAS}")
        self._made: set[str] = set()

    def step(self, model: str, steps: int) -> float:
        """Seconds per step, of the slowest replica, by the engines' clocks."""
        if model not in self._made:
            self._made.add(model)
            self._cells.run(
                "%%distribute mirrored\nimport distnb\nfrom benchmarks.training_models import steps_with_distnb\n"
                f"steps_{model} = steps_with_distnb({model!r}, distnb.replica_id(), {REPLICAS})"
            )
        self._cells.run(
            f"%%distribute mirrored\nimport torch\nseconds = torch.tensor(steps_{model}({steps}) / {steps})\n"
            "torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)\nseconds = seconds.item()"
        )
        return float(self._cells.value("seconds"))

    def close(self) -> None:
        """Stop the engines."""
        self._cells.run("%distnb stop")


@contextlib.contextmanager
def contenders(with_cell: bool) -> Iterator[dict[str, Callable[[str, int], float]]]:
    """All contenders, running: name to a function of (model, steps) to seconds per step."""
    with contextlib.ExitStack() as stack:
        made: dict[str, Ranks | Cell] = {"DDP": Ranks("ddp"), "distnb script": Ranks("distnb"), FLOOR: Ranks("alone")}
        for ranks in made.values():
            stack.callback(ranks.close)
        if with_cell:
            made["distnb cell"] = cell = Cell()
            stack.callback(cell.close)
        yield {name: contender.step for name, contender in made.items()}


def main() -> int:
    """Run it. Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=3, help="how often all processes are started anew")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per set")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--no-cell", action="store_true", help="leave the %%%%distribute cell out")
    options = parser.parse_args()

    models = options.models.split(",")
    values: dict[str, dict[str, tuple[float, ...]]] = {model: {} for model in models}
    # A process keeps its luck with memory for as long as it lives, up to a tenth of a step: hence several sets.
    for _ in range(options.sets):
        with contenders(not options.no_cell) as running:
            for model in models:
                measures = {name: functools.partial(step, model, options.steps) for name, step in running.items()}
                for name, kept in compare(measures, rounds=options.rounds, warmup=2).values.items():
                    values[model][name] = values[model].get(name, ()) + kept
    met = True
    for model in models:
        comparison = Comparison(values[model])
        targets = [Target(name, "DDP", at_most=1.0) for name in values[model] if name not in ("DDP", FLOOR)]
        met &= report(f"a training step, {model}", comparison, baseline="DDP", targets=targets)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
