"""A GPU at a glance: one table of distnb's costs there, next to plain torch and DistributedDataParallel.

    python -m benchmarks.gpu [--device cuda] [--rounds 7] [--steps 50] [--aborts 10]

Contenders are processes that take turns. Plain torch, DistributedDataParallel and a script with `MirroredStrategy` have
the device to themselves, each as one replica; with two replicas that share it, Gloo carries their gradients. Memory is
the most that tensors took during training. Aborts are in the notebook: one replica raises while the other waits in a
collective, and the time until the error is raised there is measured. `make gpu` runs this; `--device cpu`
is a dry run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.cell_shell import Cells
from benchmarks.harness import Comparison, compare, options
from benchmarks.ranks import Ranks, serve
from benchmarks.training_models import BATCH, make_batch, make_model

_MODELS = ("mlp", "convnet", "normed")
_ALL_REDUCES = {"all_reduce, 1 MB": 1 << 20, "all_reduce, 64 MB": 64 << 20}
_MEMORY = "memory"
_WIDE = "wide"
_LIMIT_S = 5.0
_PREPARE = """
import torch
import torch.distributed as dist

import distnb
"""
_RAISE = """%%distribute mirrored
ones = torch.ones(1 << 16, device=strategy.worker_devices[distnb.replica_id()])
dist.all_reduce(ones)
if distnb.replica_id() == 1:
    raise ValueError("on purpose")
dist.all_reduce(ones)
"""
_SUM = """%%distribute mirrored
total = torch.ones(1, device="cpu")
dist.all_reduce(total)
total = total.item()
"""


@dataclass(frozen=True)
class Row:
    """A line of the table: a quantity of distnb, that of a peer, and whether it is acceptable."""

    what: str
    ours: str
    peer: str = ""
    ratio: str = ""
    bad: str = ""


def main() -> int:
    """Print the table. Return 1 if a line reports a problem."""
    given = options(__doc__, device="cuda", rounds=7, steps=50, aborts=10, rank="")
    if given.rank:
        return _act_as_rank(given.rank)
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here. For a dry run: python -m benchmarks.gpu --device cpu")
    os.environ["DISTNB_DEVICE"] = f"{given.device}:0"  # for the processes of all contenders, which share it
    name = torch.cuda.get_device_name() if given.device == "cuda" else "the CPU"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {name}", flush=True)
    print(_line("", "distnb", "peer", "ratio"))
    bad = False
    for part in (_one_replica, _two_replicas, _cells):
        for row in part(given):
            print(_line(row.what, row.ours, row.peer, row.ratio, row.bad), flush=True)
            bad |= bool(row.bad)
    return 1 if bad else 0


def _line(what: str, ours: str, peer: str, ratio: str, bad: str = "") -> str:
    return f"{what:<52} {ours:>10}  {peer:<30} {ratio:>6}  {bad}".rstrip()


def _one_replica(given: Any) -> Iterator[Row]:
    names = {"plain": "plain", "DDP": "ddp", "distnb": "distnb"}
    with _running(names, replicas=1) as running:
        backend = "NCCL" if given.device == "cuda" else "Gloo"
        for what in _ALL_REDUCES:
            comparison = _compared(running, what, given, ("DDP", "distnb"))
            yield _timing(f"{backend}, 1 replica: {what}", comparison, "DDP", "torch.distributed")
        for model in _MODELS:
            comparison = _compared(running, model, given, tuple(names))
            yield _timing(f"1 replica: a step of {model}", comparison, "plain", "plain torch")
            yield _timing(f"1 replica: a step of {model}", comparison, "DDP", "DDP")
        yield from _memory(running, "1 replica")


def _two_replicas(given: Any) -> Iterator[Row]:
    with _running({"DDP": "ddp", "distnb": "distnb"}, replicas=2) as running:
        for model in _MODELS:
            comparison = _compared(running, model, given, ("DDP", "distnb"))
            yield _timing(f"2 replicas that share it: a step of {model}", comparison, "DDP", "DDP over Gloo")
        yield from _memory(running, "2 replicas")


def _memory(running: dict[str, Ranks], who: str) -> Iterator[Row]:
    found = {name: ranks.step(_MEMORY, 10) for name, ranks in running.items()}
    ours = found.pop("distnb")
    for name, peer in found.items():
        ratio = ours / peer if peer else float("nan")
        yield Row(f"{who}: memory of tensors, {_WIDE}", f"{ours:.0f} MB", f"{peer:.0f} MB ({name})", f"{ratio:.2f}×")


def _cells(given: Any) -> Iterator[Row]:
    """Measure aborts in a notebook's cells: engines share the device."""
    cells = Cells("distnb")
    began = time.perf_counter()
    os.environ.pop("DISTNB_DEVICE")  # for engines, %distnb start sets it
    cells.run(f"%distnb start --devices {given.device}:0,{given.device}:0 --oversubscribe")
    yield Row("%distnb start -n 2", f"{time.perf_counter() - began:.1f} s")
    try:
        cells.run(_PREPARE)
        cells.run(_SUM)
        seconds, failed = [], 0
        for _ in range(given.aborts):
            began = time.perf_counter()
            with contextlib.suppress(ValueError):
                cells.run(_RAISE)
                failed += 1  # no error was raised
            seconds.append(time.perf_counter() - began)
            cells.run(_SUM)
            failed += cells.value("total") != 2
        worst = max(seconds)
        bad = f"{failed} cells gave wrong results" if failed else f"over {_LIMIT_S:g} s" if worst > _LIMIT_S else ""
        middle = sorted(seconds)[len(seconds) // 2]
        yield Row(f"{given.aborts} aborts, error to prompt", f"{middle:.2f} s", f"worst {worst:.2f} s", bad=bad)
    finally:
        cells.run("%distnb stop")


@contextlib.contextmanager
def _running(names: dict[str, str], replicas: int) -> Iterator[dict[str, Ranks]]:
    with contextlib.ExitStack() as stack:
        made = {}
        for name, contender in names.items():
            made[name] = Ranks("benchmarks.gpu", contender, replicas=replicas)
            stack.callback(made[name].close)
        yield made


def _compared(running: dict[str, Ranks], what: str, given: Any, names: tuple[str, ...]) -> Comparison:
    measures = {name: functools.partial(running[name].step, what, given.steps) for name in names}
    return compare(measures, rounds=given.rounds, warmup=2)


def _timing(what: str, comparison: Comparison, peer: str, called: str) -> Row:
    ours, other = comparison.median("distnb") * 1e6, comparison.median(peer) * 1e6
    bad = "" if ours == ours and other == other else "a process ended"
    return Row(
        what, f"{ours:.0f} µs", f"{other:.0f} µs ({called})", f"{comparison.ratio('distnb', peer).median:.2f}×", bad
    )


# -- the process of a contender ----------------------------------------------------------------------------------------


def _act_as_rank(contender: str) -> int:
    import torch

    kind = os.environ["DISTNB_DEVICE"].partition(":")[0]
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if contender == "ddp":
        torch.distributed.init_process_group("nccl" if kind == "cuda" and replicas == 1 else "gloo")
    elif contender == "distnb":
        import distnb

        distnb.MirroredStrategy()
    made: dict[str, Callable[[int], float]] = {}

    def measure(what: str, count: int) -> float:
        if what == _MEMORY:
            return _memory_of(_stepping(contender, _WIDE, kind, rank, replicas), kind, count)
        if what not in made:
            made[what] = (
                _reducing(_ALL_REDUCES[what], kind)
                if what in _ALL_REDUCES
                else _stepping(contender, what, kind, rank, replicas)
            )
        return made[what](count) / count

    return serve(measure)


def _reducing(nbytes: int, kind: str) -> Callable[[int], float]:
    import torch

    tensor = torch.ones(nbytes // 4, device=kind)
    return _timed(lambda: torch.distributed.all_reduce(tensor), kind)


def _stepping(contender: str, model_name: str, kind: str, rank: int, replicas: int) -> Callable[[int], float]:
    import torch
    from torch.nn import functional as F

    import distnb

    x, y = (each.to(kind) for each in make_batch(model_name, rank, replicas))
    strategy = distnb.MirroredStrategy() if contender == "distnb" else None
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model: Any = make_model(model_name).to(kind)
        if contender == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y, reduction="none").sum() / BATCH[model_name]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _timed((lambda: step(x, y)) if strategy is None else (lambda: strategy.run(step, args=(x, y))), kind)


def _timed(call: Callable[[], object], kind: str) -> Callable[[int], float]:
    import torch

    def several(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return several


def _memory_of(steps: Callable[[int], float], kind: str, count: int) -> float:
    """Return the largest number of megabytes of tensors during some steps; on the CPU, of the process."""
    import psutil
    import torch

    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        steps(count)
        return torch.cuda.max_memory_allocated() / 1e6
    steps(count)
    return float(psutil.Process().memory_info().rss) / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
