"""The time to save and load a checkpoint, against `torch.save` and a plain copy of the bytes, all onto the disk.

    python -m benchmarks.checkpoints [--rounds 7] [--megabytes 256]

A plain copy writes the bytes of the tensors into a file, and reads them from there into the tensors. Saved files are
synced to the disk. All three load into the existing tensors. The last comparison is the time for which a training step
waits when a thread writes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import distnb
from benchmarks.guard import TARGETS
from benchmarks.harness import compare, options, report, timed

_ENTRIES = 1 << 18


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=7, megabytes=256)
    torch.set_num_threads(1)
    tensors = [torch.rand(_ENTRIES) for _ in range(max(1, given.megabytes * 1_000_000 // (4 * _ENTRIES)))]
    state = {f"layer{number}": tensor for number, tensor in enumerate(tensors)}
    checkpoint = distnb.Checkpoint(state=state)
    kept, size = True, f"{given.megabytes} MB"
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)

        def synced(save: Callable[[Path], object]) -> Callable[[], object]:
            def saved() -> None:
                path = folder / "other"
                save(path)
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

            return saved

        arrays: list[Any] = [tensor.numpy() for tensor in tensors]

        def copy(path: Path) -> None:
            with path.open("wb") as file:
                for array in arrays:
                    file.write(memoryview(array))

        def save(wait: bool = True) -> float:
            shutil.rmtree(folder / "ours", ignore_errors=True)
            spent = timed(lambda: checkpoint.write(folder / "ours", wait=wait))()
            checkpoint.wait()
            return spent

        saving = {
            "distnb": save,
            "torch.save": timed(synced(lambda path: torch.save(state, path))),
            "plain copy": timed(synced(copy)),
        }
        saved = compare(saving, rounds=given.rounds)
        kept &= report(f"{size} saved", saved, baseline="plain copy", targets=TARGETS["checkpoints"]["saved"])

        torch.save(state, folder / "torch")
        copy(folder / "copy")
        save()

        def load_torch() -> None:
            for name, tensor in torch.load(folder / "torch").items():
                state[name].copy_(tensor)

        def load_copy() -> None:
            with (folder / "copy").open("rb") as file:
                for array in arrays:
                    file.readinto(memoryview(array).cast("B"))

        loading = {
            "distnb": timed(lambda: checkpoint.restore(folder / "ours")),
            "torch.load": timed(load_torch),
            "plain copy": timed(load_copy),
        }
        loaded = compare(loading, rounds=given.rounds)
        kept &= report(f"{size} loaded", loaded, baseline="plain copy", targets=TARGETS["checkpoints"]["loaded"])

        others = [torch.empty_like(tensor) for tensor in tensors]

        def in_memory() -> None:
            for tensor, other in zip(tensors, others, strict=True):
                other.copy_(tensor)

        step = {"distnb, wait=False": lambda: save(wait=False), "memcpy": timed(in_memory)}
        report("what a step waits for", compare(step, rounds=given.rounds), baseline="memcpy")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
