"""`distnb run --min` and `distnb.elastic` with real processes, some of which kill themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(170)

_TRAIN = """
import os, sys, time, torch, distnb

strategy = distnb.MirroredStrategy()
torch.manual_seed(3)
x = torch.randn(240, 5)
with strategy.scope():
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    seen = distnb.Variable(0)
    mean = distnb.metrics.Mean()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
data = strategy.distribute_dataset(torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True))

def end_once(name):
    if os.path.exists("wanted") and not os.path.exists(name):
        open(name, "w").close()
        os.kill(os.getpid(), 9)

def step(batch):
    inputs, targets = batch
    loss = distnb.nn.compute_average_loss((model(inputs) - targets).square().mean(1))
    if int(seen) == 9 and os.environ["RANK"] == "1":
        end_once("before the gradients")
    loss.backward()
    if int(seen) == 25 and os.environ["RANK"] == "0":
        end_once("before the step")
    optimizer.step()
    optimizer.zero_grad()
    mean.update_state((model(inputs) - targets).detach().abs())

def train(commit):
    sys.stdout.write(f"train {strategy.num_replicas_in_sync} {int(seen)}\\n")
    while data.epoch < 2:
        for batch in data:
            strategy.run(step, (batch,))
            schedule.step()
            seen.assign_add(1)
            commit()
            while int(seen) in (20, 30) and strategy.num_replicas_in_sync < int(sys.argv[1]):
                time.sleep(0.02)
                commit()
    return "trained"

checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer, schedule=schedule, data=data, seen=seen, mean=mean)
directory = "commits" if len(sys.argv) > 2 else None
print(distnb.elastic(train, checkpoint, directory=directory), int(seen), strategy.num_replicas_in_sync)
result = model.state_dict() | {"mean": torch.as_tensor(mean.result())}
if distnb.is_chief():
    torch.save(result, "result.pt")
"""


def _run(folder: Path, launcher: str, arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(_TRAIN)
    words = [sys.executable, "-m", *launcher.split(), "train.py", *arguments.split()]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of a run of one process without a loss."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = _run(folder, "distnb run -n 1", "1")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt")


def test_a_lost_process_is_replaced_and_the_weights_are_those_of_a_run_without_losses(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "wanted").touch()
    (tmp_path / "before the gradients").touch()  # so that only rank 0 is lost, after it has summed the gradients
    done = _run(tmp_path, "distnb run --min 2 --max 3", "3")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), undisturbed, rtol=1e-5, atol=1e-6)
    out = done.stdout.splitlines()
    assert sorted(line for line in out if "trained" in line) == [f"[{n}] trained 40 3" for n in (1, 2, 3)]
    first, again, last, end = [line.removeprefix("[2] ") for line in out if line.startswith("[2]")]
    assert again in ("train 2 25", "train 2 26")  # the others may complete the step
    assert [first, last, end] == ["train 3 0", "train 3 30", "trained 40 3"]
    assert done.stderr.splitlines() == [
        "distnb run: Process 0 was killed by SIGKILL.",
        "distnb run: 2 processes train.",
        "distnb run: Process 3 is started on cpu:0.",
        "distnb run: Process 3 joined. 3 processes train.",
    ]


@pytest.mark.soak
def test_one_process_after_another_is_lost(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    (tmp_path / "wanted").touch()
    done = _run(tmp_path, "distnb run --min 2 --max 3", "3")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), undisturbed, rtol=1e-5, atol=1e-6)
    assert sorted(line for line in done.stdout.splitlines() if "trained" in line) == [
        f"[{n}] trained 40 3" for n in (2, 3, 4)
    ]


@pytest.mark.soak
def test_under_torchrun_the_same_program_continues_from_the_saved_commit(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "wanted").touch()
    (tmp_path / "before the step").touch()  # one loss will do
    torchrun = "torch.distributed.run --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d"
    launcher = f"{torchrun} --rdzv-endpoint=127.0.0.1:0 --log-dir={tmp_path / 'logs'}"
    done = _run(tmp_path, launcher, "2 saved")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), undisturbed, rtol=1e-5, atol=1e-6)
    assert done.stdout.count("train 2 0") == done.stdout.count("train 2 9") == 2, done.stdout


def test_the_script_ends_if_too_few_are_left_for_too_long(tmp_path: Path) -> None:
    (tmp_path / "wanted").touch()
    done = _run(tmp_path, "distnb run --min 2 --max 2 --wait 0.3", "2")
    assert done.returncode == 137
    assert done.stderr.splitlines()[-2:] == [
        "distnb run: 1 process of at least 2 is left: the training waits for others.",
        "distnb run: Fewer than 2 processes were left for 0.3 s. The script is ended.",
    ]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        # An error of the code ends the script, although a process has ended.
        ("if rank == 1: raise ValueError('boom')", 1, "ValueError: boom"),
        # A loss before the training is an ordinary failure.
        ("if rank == 1: import os; os.kill(os.getpid(), 9)", 137, "process 1 was killed by SIGKILL. The others were"),
        ("distnb.elastic(train, checkpoint)", 1, "calls distnb.elastic once"),
        ("w.assign_add(1); import sys; sys.exit(5)", 5, "exited with code 5"),
    ],
)
def test_other_ends_are_those_of_an_ordinary_script(tmp_path: Path, text: str, code: int, expected: str) -> None:
    late = "sys.exit" in text or "elastic" in text
    (tmp_path / "train.py").write_text(
        "import torch, distnb\n"
        "strategy = distnb.MirroredStrategy()\n"
        "rank = distnb.replica_id()\n"
        "with strategy.scope():\n    w = distnb.Variable(0.0)\n"
        + ("" if late else f"{text}\n")
        + "checkpoint = distnb.Checkpoint(w=w)\n"
        "def train(commit):\n    for _ in range(5):\n        commit()\n"
        "distnb.elastic(train, checkpoint)\n" + (f"{text}\n" if late else "")
    )
    words = [sys.executable, "-m", "distnb", "run", "--min", "1", "--max", "2", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr


@pytest.mark.soak
def test_sharded_models_cannot_continue_in_memory(tmp_path: Path) -> None:
    program = _TRAIN.replace("MirroredStrategy", "ShardedStrategy").replace("Linear(5, 1)", "Linear(5, 4)")
    (tmp_path / "train.py").write_text(program.replace("x.sum(1, keepdim=True)", "x[:, :4]"))
    words = [sys.executable, "-m", "distnb", "run", "--min", "2", "--max", "3", "train.py", "3"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stderr
    assert "Use MirroredStrategy, or leave out --min and give distnb.elastic a directory" in done.stderr
