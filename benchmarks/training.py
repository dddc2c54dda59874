"""Training steps per second: distnb against torchrun with DistributedDataParallel, 2 replicas on the CPU over Gloo.

    python -m benchmarks.training [--sets 3] [--rounds 5] [--steps 40] [--models mlp,deep] [--no-cell]
        [--two-machines] [--delay-ms 10]

Four contenders take turns, each with two processes of its own: DistributedDataParallel in torchrun's environment; a
script with `MirroredStrategy` in the same environment; a `%%distribute mirrored` cell; and the floor, two processes
that train alone, without communication. All run one thread per process, and the same model, batch and optimizer.

With --two-machines (as root) the first two have a process on each of two network namespaces with a cable between them,
and an all_reduce through `torch.distributed` is measured, too. --delay-ms is the delay of a packet.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator

from benchmarks.cell_shell import Cells
from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, compare, options, report
from benchmarks.ranks import REPLICAS, Ranks, serve, two_machines
from benchmarks.training_models import MODELS, steps_alone, steps_with_ddp, steps_with_distnb

FLOOR = "no communication"
_ALL_REDUCE, _ALL_REDUCE_NBYTES = "all_reduce", 273 * 1024


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
        """Return the seconds per step of the slowest replica, by the engines' clocks."""
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


def act_as_rank(contender: str) -> int:
    """Answer requests as a process of a contender: all_reduces, or steps of a model."""
    import torch

    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if contender == "ddp":
        torch.distributed.init_process_group("gloo")
    elif contender == "distnb":
        import distnb

        distnb.MirroredStrategy()
    make = {"ddp": steps_with_ddp, "alone": steps_alone, "distnb": steps_with_distnb}[contender]
    made: dict[str, Callable[[int], float]] = {_ALL_REDUCE: _all_reduces}

    def measure(model: str, steps: int) -> float:
        if model not in made:
            made[model] = make(model, rank, replicas)
        return made[model](steps) / steps

    return serve(measure)


def _all_reduces(count: int) -> float:
    import torch

    tensor = torch.ones(_ALL_REDUCE_NBYTES // 4)
    torch.distributed.barrier()
    began = time.perf_counter()
    for _ in range(count):
        torch.distributed.all_reduce(tensor)
    return time.perf_counter() - began


@contextlib.contextmanager
def contenders(with_cell: bool, across: bool, delay_ms: float) -> Iterator[dict[str, Callable[[str, int], float]]]:
    """Start all contenders, as functions by name of (model, steps) that return seconds per step."""
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(two_machines(delay_ms)) if across else ()
        names = {"DDP": "ddp", "distnb script": "distnb", **({} if across else {FLOOR: "alone"})}
        made: dict[str, Ranks | Cell] = {
            name: Ranks("benchmarks.training", contender, machines=machines) for name, contender in names.items()
        }
        if with_cell and not across:
            made["distnb cell"] = Cell()
        for each in made.values():
            stack.callback(each.close)
        yield {name: each.step for name, each in made.items()}


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(
        __doc__,
        sets=3,
        rounds=5,
        steps=40,
        models=",".join(MODELS),
        no_cell=False,
        two_machines=False,
        delay_ms=0.0,
        rank="",
    )
    if given.rank:
        return act_as_rank(given.rank)
    models = [*([_ALL_REDUCE] if given.two_machines else []), *given.models.split(",")]
    values: dict[str, dict[str, tuple[float, ...]]] = {model: {} for model in models}
    # The placement of a process's memory, fixed for its life, changes a step by up to a tenth. Hence several sets.
    for _ in range(given.sets):
        with contenders(not given.no_cell, given.two_machines, given.delay_ms) as running:
            for model in models:
                measures = {name: functools.partial(step, model, given.steps) for name, step in running.items()}
                for name, kept in compare(measures, rounds=given.rounds, warmup=2).values.items():
                    values[model][name] = values[model].get(name, ()) + kept
    met = True
    targets = TARGETS["training"]["step on two machines" if given.two_machines else "step"]
    for model in models:
        comparison = Comparison(values[model])
        title = "an all_reduce of 273 KB" if model == _ALL_REDUCE else f"a training step, {model}"
        met &= report(title, comparison, baseline="DDP", targets=targets)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
