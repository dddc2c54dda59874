"""Compare a cell that reads an unchanged object, and one that sends it the first time, with the least possible work.

    python -m benchmarks.namespace [--rounds 5] [--kinds records frame tensors array]

The floor of an unchanged object is one dump by cloudpickle's C pickler, with buffers out of band, and a fast hash of
all bytes. The floor of a first send adds what every sender must do as well: one copy of all bytes, in place of their
way to the other process, and one load. Tensors are dumped with a reducer that gives their memory, because torch's own
takes twenty times as long. The time of a cell is that of one that reads the object, less that of an empty one, on one
engine.
"""

from __future__ import annotations

import argparse
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch
import xxhash

from benchmarks.cell_shell import Cells
from benchmarks.guard import TARGETS
from benchmarks.harness import compare, report


class _Floor(cloudpickle.Pickler):  # type: ignore[misc]
    """The cheapest pickler that sees all of a tensor."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            data: Any = obj.numpy()
            return _tensor, (pickle.PickleBuffer(data),)
        return super().reducer_override(obj)


def _tensor(memory: Any) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.float32)  # all tensors of `KINDS` are vectors of this type


def floor(value: Any, *, sent: bool = False) -> float:
    """Measure one dump and one hash, in seconds; with `sent`, also one copy and one load."""
    start = time.perf_counter()
    buffers: list[Any] = []
    file = io.BytesIO()
    _Floor(file, protocol=5, buffer_callback=buffers.append).dump(value)
    data = file.getvalue()
    hasher = xxhash.xxh3_128(data)
    for each in buffers:
        hasher.update(each.raw())
    if sent:
        pickle.loads(bytearray(data), buffers=[bytearray(each.raw()) for each in buffers])
    return time.perf_counter() - start


def _frame() -> Any:
    import pandas

    return pandas.DataFrame({"text": [f"row {i % 997}" for i in range(1_000_000)], "x": np.arange(1e6)})


KINDS: dict[str, Callable[[], Any]] = {
    "records": lambda: [{"id": i, "name": str(i), "value": i * 1.5} for i in range(100_000)],
    "frame": _frame,
    "tensors": lambda: {f"t{i}": torch.full((10,), float(i)) for i in range(10_000)},
    "array": lambda: np.random.default_rng(0).random(8_000_000),
    "small": lambda: [{"id": i} for i in range(1_000)],
}


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    cells = Cells("distnb")
    cells.run("%distnb start -n 1")
    kept = True
    try:
        for kind in options.kinds:
            kept &= _measure(cells, kind, options.rounds)
    finally:
        cells.run("%distnb stop")
    return 0 if kept else 1


def _measure(cells: Cells, kind: str, rounds: int) -> bool:
    names = cells.shell.user_ns
    value = names["obj"] = KINDS[kind]()

    def cell(text: str) -> float:
        start = time.perf_counter()
        cells.run(f"%%distribute mirrored\n{text}")
        return time.perf_counter() - start

    def first() -> float:
        names["obj"] = pickle.loads(pickle.dumps(value))  # other objects of the same content are sent
        return max(1e-6, cell("obj; None") - cell("pass"))

    def unchanged() -> float:
        return max(1e-6, cell("obj; None") - cell("pass"))

    def next_to_change() -> float:
        """Measure a cell that reads the unchanged object, and a small list that changed."""
        names["changed"] = [time.perf_counter()]
        return max(1e-6, cell("obj, changed; None") - cell("pass"))

    cell("obj; None")
    again = compare({"unchanged": unchanged, "changed": next_to_change, "floor": lambda: floor(value)}, rounds=rounds)
    targets = TARGETS["namespace"]
    kept = report(f"{kind}: read, and not changed", again, baseline="floor", targets=targets[f"{kind}, unchanged"])
    sent = compare({"first": first, "floor": lambda: floor(value, sent=True)}, rounds=max(2, rounds // 2))
    kept &= report(f"{kind}: sent the first time", sent, baseline="floor", targets=targets[f"{kind}, first"])
    del names["obj"]
    return kept


if __name__ == "__main__":
    raise SystemExit(main())
