"""A mirrored cell on a GPU: NCCL if each replica has its own, host memory if replicas share one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TRAIN = """%%distribute mirrored
import torch, distnb
import torch.nn.functional as F
torch.manual_seed(0)
x, y = torch.randn(96, 16, device="cpu"), torch.randint(0, 4, (96,), device="cpu")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=28)
with strategy.scope():
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

def step(batch):
    inputs, targets = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(inputs), targets, reduction="none"))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss

history = tuple(
    strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item()
    for epoch in range(3) for batch in strategy.distribute_dataset(loader)
)
device = str(next(model.parameters()).device)
"""


def one_gpu(engines: int) -> Iterator[Notebook]:
    with Notebook(env={"CUDA_VISIBLE_DEVICES": "0"}) as notebook:
        notebook.run(f"%distnb start -n {engines}" + (" --oversubscribe" if engines > 1 else ""), timeout_s=120)
        yield notebook


@pytest.fixture
def alone() -> Iterator[Notebook]:
    yield from one_gpu(1)


@pytest.fixture
def shared() -> Iterator[Notebook]:
    yield from one_gpu(2)


def test_a_preloaded_module_may_have_asked_cuda_for_gpus(tmp_path: Path) -> None:
    (tmp_path / "asks_cuda.py").write_text("import torch\ntorch._C._cuda_getDeviceCount()\n")
    environment = {"CUDA_VISIBLE_DEVICES": "0", "DISTNB_PRELOAD": "asks_cuda", "PYTHONPATH": str(tmp_path)}
    with Notebook(env=environment) as notebook:
        notebook.run("%distnb start -n 1", timeout_s=120)
        notebook.run("%%distribute mirrored\nimport torch\nfound = torch.ones(2, device='cuda').sum().item()")
        assert notebook.value("found") == 2.0


def on_cpu(notebook: Notebook) -> list[float]:
    notebook.run(
        TRAIN.replace("mirrored", "default").replace("with strategy", "torch.set_default_device('cpu')\nwith strategy")
    )
    return list(notebook.value("history"))


def test_one_replica_uses_nccl_and_computes_the_same_as_the_cpu(alone: Notebook) -> None:
    alone.run(TRAIN)
    assert alone.value("device") == "cuda:0"
    history = list(alone.value("history"))
    alone.run("%%distribute mirrored\nimport torch.distributed as dist\nbackend = dist.get_backend()")
    assert "nccl" in alone.value("backend")
    assert history == pytest.approx(on_cpu(alone), rel=1e-4)


def test_two_replicas_share_a_gpu_and_compute_the_same(shared: Notebook) -> None:
    shared.run(TRAIN)
    assert shared.value("device") == "cuda:0"
    assert list(shared.value("history")) == pytest.approx(on_cpu(shared), rel=1e-4)


def test_an_error_on_one_replica_frees_the_other_and_the_next_cell_works(shared: Notebook) -> None:
    ran = shared.try_run(
        "%%distribute mirrored\nimport torch, distnb, torch.distributed as dist\n"
        "if distnb.replica_id() == 1:\n    raise ValueError('mine')\ndist.all_reduce(torch.ones(3))",
        timeout_s=30,
    )
    assert (ran.error_name, ran.error_text) == ("ValueError", "mine")
    shared.run(TRAIN)


def test_the_quick_start_runs(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "notebooks" / "demo.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one engine for each of" in done.stdout


def test_central_storage_keeps_everything_on_the_one_gpu() -> None:
    with Notebook(env={"CUDA_VISIBLE_DEVICES": "0"}) as notebook:
        notebook.run("%distnb start -n 1", timeout_s=120)
        notebook.run(TRAIN.replace("mirrored", "central_storage", 1).replace("SGD", "Adam"), timeout_s=120)
        notebook.run(
            "%%distribute central_storage\n"
            "kept = {str(each.device) for state in optimizer.state.values() for each in state.values() if each.ndim}\n"
            "kept = ' '.join(sorted(kept))\n"
        )
        assert notebook.value("(device, kept)") == ("cuda:0", "cuda:0")
