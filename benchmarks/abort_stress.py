"""Stress of aborts in mid-traffic: every replica must be free within a second, and later sums must be right.

`python -m benchmarks.abort_stress [--ranks 2 4] [--rounds 25] [--traffic small 4MB 64MB shared ddp messages]`

Each round joins a new generation of the process group, checks a sum, forks a DataLoader worker that stays alive, and
sends traffic until a thread of each replica aborts at about the same moment; in every other round one replica stopped
calling before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "stress"]

TRAFFIC = ("small", "4MB", "64MB", "shared", "ddp", "messages")
_NUMBERS = {"small": 10, "4MB": 1 << 20, "64MB": 1 << 24, "shared": 1 << 20, "ddp": 1, "messages": 1 << 16}
LIMIT_S = 1.0
_HEADING = "ranks   traffic  aborts  freed  median ms     p95     max  wrong formed ms  threads"


# -- one replica ------------------------------------------------------------------------------------------------------


def _replica(rank: int, size: int, port: int, rounds: int, traffic: Sequence[str], seed: int, out: Path) -> None:
    import torch

    from distnb.collectives.group import communicator
    from distnb.collectives.group.memberships import memberships
    from distnb.topology import Device, Team

    torch.set_num_threads(1)
    communicator._ABORT_GRACE_S = 60.0  # a replica whose thread aborts late must not consider the others lost
    device = Device("cpu")
    records: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    generation = 0
    for kind in traffic:
        for number in range(rounds):
            team = Team(
                engines=tuple(range(size)),
                devices=(device,) * size,
                generation=generation,
                store_host="127.0.0.1",
                store_port=port,
            )
            began = time.monotonic()
            group = memberships.join(team, rank, device)
            formed = time.monotonic() - began
            memberships.program_began(generation)
            right = _sum_is_right(group) and (kind != "ddp" or _ddp_is_right(group, models))
            worker = _worker()
            shared = random.Random(f"{seed}/{generation}")
            stops = shared.randrange(size) if number % 2 else -1
            error, freed = _until_aborted(group, kind, models, shared, stopped=stops == rank)
            memberships.program_failed()
            del worker
            records.append({"traffic": kind, "freed_s": freed, "error": error, "right": right, "formed_s": formed})
            generation += 1
    out.write_text(json.dumps({"records": records, "threads": len(os.listdir("/proc/self/task"))}))


def _sum_is_right(group: Any) -> bool:
    import torch
    import torch.distributed as dist

    for numel in (7, 100_000):
        for all_reduce in (group.all_reduce, dist.all_reduce):
            tensor = torch.full((numel,), group.rank + 1.0)
            all_reduce(tensor)
            if not bool((tensor == group.size * (group.size + 1) / 2).all()):
                return False
    return True


def _ddp_is_right(group: Any, models: dict[str, Any]) -> bool:
    import torch

    # Wrapped again, because DDP's internal state does not survive a backward pass that failed.
    models["ddp"] = model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
    model(torch.full((2, 512), group.rank + 1.0)).sum().backward()
    return bool(torch.allclose(model.module.weight.grad, torch.full((512, 512), (group.size + 1.0))))


def _worker() -> Any:
    """Return the iterator of a DataLoader's worker, which is forked while the group is connected, and lives as long."""
    import torch

    loader: Any = torch.utils.data.DataLoader(range(1000), num_workers=1, prefetch_factor=2)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    return iterator


def _until_aborted(
    group: Any, kind: str, models: dict[str, Any], shared: random.Random, stopped: bool
) -> tuple[str, float]:
    from distnb.collectives.group.memberships import memberships
    from distnb.errors import ProgramAborted

    struck = [0.0]
    after = shared.uniform(0.01, 0.3)
    skew = random.uniform(0.0, 0.01)

    def strike() -> None:
        struck[0] = time.monotonic()
        memberships.abort("stress")

    timer = threading.Timer(after + skew, strike)
    step = _step(group, kind, models)
    steps_before_stop = shared.randrange(1, 5)
    timer.start()
    try:
        for count in range(10**9):
            if stopped and count == steps_before_stop:
                raise ValueError("this replica stops")
            step()
    except ValueError:
        timer.join()
        return "stopped", 0.0
    except (ProgramAborted, RuntimeError) as error:
        ended = time.monotonic()
        timer.join()
        return type(error).__name__, max(0.0, ended - struck[0])
    raise AssertionError("unreachable")


def _step(group: Any, kind: str, models: dict[str, Any]) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(_NUMBERS[kind])
    if kind == "ddp":
        inputs = torch.ones(2, 512)
        return lambda: models["ddp"](inputs).sum().backward()
    if kind == "messages":
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        received = torch.empty_like(tensor)

        def exchange() -> None:
            sending = dist.isend(tensor, right)
            dist.recv(received, left)
            assert sending is not None
            sending.wait()

        return exchange
    if kind == "shared":
        return lambda: group.all_reduce(tensor.fill_(1.0))
    return lambda: dist.all_reduce(tensor.fill_(1.0))


# -- all replicas -----------------------------------------------------------------------------------------------------


def stress(
    size: int, rounds: int, traffic: Sequence[str] = TRAFFIC, *, timeout_s: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Run the rounds on `size` replicas.

    Args:
        size: The number of replicas.
        rounds: The number of aborts per kind of traffic.
        traffic: The kinds of traffic.
        timeout_s: The limit, after which all replicas are killed and their stacks shown.
        seed: The seed of the times of aborts.

    Returns:
        The records of each replica.

    Raises:
        AssertionError: A replica did not finish.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        outs = [Path(folder, str(rank)) for rank in range(size)]
        command = [sys.executable, "-m", "benchmarks.abort_stress", "--port", str(store.port), "--rounds", str(rounds)]
        command += ["--seed", str(seed), "--size", str(size), "--traffic", *traffic]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--out", str(out)], env=environment, stderr=subprocess.PIPE, text=True
            )
            for rank, out in enumerate(outs)
        ]
        try:
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                if process.stderr:
                    process.stderr.close()
        return [json.loads(out.read_text()) for out in outs]


def _wait(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    errors: dict[int, str] = {}

    def drain(rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        errors[rank] = process.stderr.read()

    for rank, process in enumerate(processes):
        threading.Thread(target=drain, args=(rank, process), daemon=True).start()
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if any(process.poll() for process in processes):
            time.sleep(0.5)
            break
        time.sleep(0.05)
    if all(process.poll() == 0 for process in processes):
        return
    stacks = "\n".join(_stack(process.pid) for process in processes if process.poll() is None)
    codes = [process.poll() for process in processes]
    raise AssertionError(
        f"The replicas ended with {codes} (None: not within {timeout_s:g} s).\n{stacks}\n" + "\n".join(errors.values())
    )


def _stack(pid: int) -> str:
    py_spy = Path(sys.executable).with_name("py-spy")
    try:
        return subprocess.run(
            [py_spy, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"pid {pid}: no stack ({error})"


def _report(size: int, replicas: Sequence[dict[str, Any]], traffic: Sequence[str]) -> bool:
    fine = True
    for kind in traffic:
        records = [record for replica in replicas for record in replica["records"] if record["traffic"] == kind]
        freed = sorted(record["freed_s"] for record in records if record["error"] != "stopped")
        formed = statistics.median(record["formed_s"] for record in records)
        wrong = sum(not record["right"] for record in records)
        aborts = len(records) // size
        fine = fine and not wrong and freed[-1] < LIMIT_S
        times_ms = [1e3 * value for value in (statistics.median(freed), freed[int(len(freed) * 0.95)], freed[-1])]
        threads = max(replica["threads"] for replica in replicas)
        print(
            f"{size:>5} {kind:>9} {aborts:>7} {len(freed):>6} {times_ms[0]:>10.1f} {times_ms[1]:>7.1f} "
            f"{times_ms[2]:>7.1f} {wrong:>6} {formed * 1e3:>9.1f} {threads:>8}",
            flush=True,
        )
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stress and print a table. Return 1 if a replica was not free within a second, or a sum was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--traffic", nargs="+", default=list(TRAFFIC), choices=TRAFFIC)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0)
    for hidden in ("--rank", "--size", "--port"):
        parser.add_argument(hidden, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        _replica(given.rank, given.size, given.port, given.rounds, given.traffic, given.seed, given.out)
        return 0
    print(_HEADING)
    fine = True
    for size in given.ranks:
        for kind in given.traffic:
            replicas = stress(size, given.rounds, [kind], timeout_s=given.timeout, seed=given.seed)
            fine = _report(size, replicas, [kind]) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
