"""Unmodified programs for torchrun, run in a `%%distribute` cell, with the same numbers as under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.keras_nightly import NIGHTLY, needs_nightly
from tests.support.kernel import Notebook
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

PROGRAMS = Path(__file__).parent / "programs"
REPLICAS = 2
# torch's own: where a DDP model holds the last reference to a Gloo group, its end waits, with the interpreter's lock, for a
# thread that may want that lock to end a barrier. So under torchrun, where no group is ours, groups are kept.
KEEP_GROUPS = """\
import torch.distributed as _dist
_init, _groups = _dist.init_process_group, []
def _init_and_keep(*args, **kwargs):
    _init(*args, **kwargs)
    _groups.append(_dist.group.WORLD)
_dist.init_process_group = _init_and_keep
"""


@pytest.mark.parametrize(
    "name", ["ddp_tutorial", "accelerate_loop", pytest.param("fabric_loop", marks=pytest.mark.soak)]
)
def test_a_program_gives_the_same_numbers_as_under_torchrun(notebook: Notebook, name: str) -> None:
    runs_alike(notebook, (PROGRAMS / f"{name}.py").read_text(encoding="utf-8"))


@needs_nightly
@pytest.mark.soak
def test_keras_data_parallelism_works_and_a_scope_works_after_it() -> None:
    """Check that a scope does not sum again what Keras sums by itself if there is a process group."""
    with Notebook(2) as notebook:
        first = f"import sys\nsys.path.insert(0, {str(NIGHTLY)!r})\n"
        notebook.run(first)
        runs_alike(notebook, first + (PROGRAMS / "keras_data_parallel.py").read_text(encoding="utf-8"))
        training = (
            "keras.utils.set_random_seed(5)\n"
            "with strategy.scope():\n"
            "    again = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)])\n"
            "    again.compile(keras.optimizers.SGD(0.1), loss)\n"
            "losses = again.fit(rows, rows.sum(axis=1) > 0, batch_size=16, epochs=2, verbose=0).history['loss']"
        )
        notebook.run(f"%%distribute mirrored\n{training}", timeout_s=60)
        notebook.run("several = losses\nimport keras\nloss = keras.losses.SparseCategoricalCrossentropy(True)\n")
        notebook.run(f"%%distribute default\n{training}", timeout_s=60)
        assert notebook.value("[round(float(each), 5) for each in several]") == pytest.approx(
            notebook.value("losses"), abs=2e-5
        )


def runs_alike(notebook: Notebook, program: str) -> None:
    """Run a program twice in a cell, and compare it with torchrun."""
    under_torchrun = [rank.check().result for rank in run_ranks(KEEP_GROUPS + program, REPLICAS, timeout_s=90)]
    for _ in range(2):  # users run cells again: leftovers of the first run must not matter
        notebook.run(f"%%distribute mirrored\n{program}", timeout_s=90)
        printed = notebook.run(
            "import json, distnb\nprint(json.dumps(distnb.MirroredStrategy().local_results(result)))"
        )
        in_cell = json.loads(printed.stdout)
        assert flat(in_cell[0]) == pytest.approx(flat(under_torchrun[0]), rel=1e-6)
        assert flat(in_cell[-1]) == pytest.approx(flat(under_torchrun[-1]), rel=1e-6)


def flat(value: object) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for part in value for number in flat(part)]
    assert isinstance(value, int | float)
    return [value]


def test_torchruns_variables_set_by_a_program_affect_only_its_own_cell(notebook: Notebook) -> None:
    pasted = (
        "import os\nos.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='elsewhere', MASTER_PORT='1')\n"
        "del os.environ['LOCAL_RANK']\nprint(os.environ['WORLD_SIZE'])"
    )
    assert notebook.run(f"%%distribute mirrored\n{pasted}").stdout == "[0-1] 1\n"
    read = "import os, distnb\nprint(distnb.replica_id(), os.environ['RANK'], os.environ['WORLD_SIZE'], 'LOCAL_RANK' in os.environ)"
    ran = notebook.run(f"%%distribute mirrored\n{read}")
    assert "0 0 2 True" in ran.stdout
    assert "1 1 2 True" in ran.stdout
    assert "WORLD_SIZE was 1" in ran.stderr
    assert "LOCAL_RANK was deleted" in ran.stderr
    assert not notebook.run(f"%%distribute mirrored\n{read}").stderr


_TUTORIAL = """\
%%distribute mirrored
import os, distnb, torch, torch.distributed as dist, torch.multiprocessing as mp
def setup(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29511"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
def demo(rank, world_size):
    setup(rank, world_size)
    total = torch.ones(1) + rank
    dist.all_reduce(total)
    dist.destroy_process_group()
    print("total", total.item())
"""


def test_spawning_ranks_is_refused_and_calling_their_function_works(notebook: Notebook) -> None:
    spawned = notebook.try_run(_TUTORIAL + "mp.spawn(demo, args=(2,), nprocs=2, join=True)")
    assert spawned.error_name == "ContextError"
    assert "the engines are the processes" in spawned.error_text
    assert spawned.error_text.endswith("Call the function directly: demo(distnb.replica_id(), 2).")
    started = notebook.try_run(_TUTORIAL + "process = mp.Process(target=demo, args=(0, 2))\nprocess.start()")
    assert started.error_name == "ContextError"
    assert "`demo`" in started.error_text
    assert notebook.run(_TUTORIAL + "demo(distnb.replica_id(), 2)").stdout == "[0-1] total 3.0\n"
    pool = "from multiprocessing import Pool\nwith Pool(1) as pool: print(pool.map(abs, [-1]))"
    assert notebook.run(f"%%distribute mirrored\n{pool}").stdout == "[0-1] [1]\n"


_ROWS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, row):
        return torch.tensor(scale * row)
class Found:
    def __init__(self, number):
        self.number = number
scale, rows = 3, Rows()
"""
_LOADER = (
    "loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context='spawn', "
    "collate_fn=lambda items: torch.stack(items))\nprint([batch.tolist() for batch in loader])"
)
_POOL = (
    "import multiprocessing\ndef find(number):\n    return Found(scale * number)\n"
    "with multiprocessing.get_context('spawn').Pool(1) as pool: found = pool.map(find, [1, 2])\n"
    "print([each.number for each in found], type(found[0]) is Found)"
)


@pytest.mark.parametrize(
    ("how", "text", "shown"),
    [("mirrored --replicas 0", _LOADER, "[[0, 3], [6, 9]]\n"), ("default", _POOL, "[3, 6] True\n")],
)
def test_spawned_processes_find_classes_and_functions_of_the_notebook(
    notebook: Notebook, how: str, text: str, shown: str
) -> None:
    notebook.run(f"import torch\n{_ROWS}")
    assert notebook.run(f"%%distribute {how}\n{text}").stdout.endswith(shown)
