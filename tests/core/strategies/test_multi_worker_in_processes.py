"""MultiWorkerMirroredStrategy as in Keras's guide: one script on every machine, each with its own TF_CONFIG."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.kernel import Notebook
from tests.support.tasks import Tasks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

TRAIN = """
import torch.nn.functional as F
def train(strategy):
    torch.manual_seed(3)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(22, 4, generator=g), torch.randint(0, 2, (22,), generator=g)
    batches = strategy.distribute_dataset(torch.utils.data.TensorDataset(x, y), batch_size=8)
    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
        loss.backward()
        optimizer.step()
        return loss
    losses = []
    for epoch in range(2):
        for batch in batches:  # 8, 8 and 6 of 22
            losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item())
    strategy.assert_in_sync(model)
    return [*losses, *(p.sum().item() for p in model.parameters())]
"""
# Each process counts as a machine of its own for shared memory.
APART = "from distnb.collectives.shared_memory import host\nhost.identity = lambda: f'machine {os.getpid()}'\n"

MANY_CALLS = """
from distnb.collectives.group.interface import Group
calls, original = [], Group.all_reduce_start
def counted(self, tensor, *args, **kwargs):
    calls.append(tensor.numel())
    return original(self, tensor, *args, **kwargs)
Group.all_reduce_start = counted
"""


def test_two_workers_train_like_one_replica():
    program = (
        TRAIN
        + """
import psutil
strategy = distnb.MultiWorkerMirroredStrategy()
numbers = train(strategy)
task = strategy.cluster_resolver
listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
report(numbers=numbers, task=[task.task_type, task.task_id], rank=distnb.replica_id(), chief=distnb.is_chief(),
     size=strategy.num_replicas_in_sync, devices=strategy.worker_devices, listening=sorted(listening),
     torchrun=[os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")])
try:
    del os.environ["TF_CONFIG"]
    distnb.MultiWorkerMirroredStrategy()
except RuntimeError as error:
    report(moved=str(error))
"""
    )
    alone = TRAIN + "report(numbers=train(distnb.MultiWorkerMirroredStrategy()))\n"
    with Tasks(alone, ["evaluator 0"]) as tasks:
        expected = tasks.end_of("evaluator 0").check().reported["numbers"]
    with Tasks(program, ["worker 0", "worker 1"]) as tasks:
        ended = [task.check().reported for task in tasks.wait()]
    for rank, reported in enumerate(ended):
        assert reported["numbers"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert reported["task"] == ["worker", rank]
        assert (reported["rank"], reported["chief"], reported["size"]) == (rank, rank == 0, 2)
        assert reported["devices"] == ["cpu:0", "cpu:0"]
        assert set(reported["listening"]) <= {"127.0.0.1"}
        assert reported["torchrun"] == [str(rank), "2", "0", "1"]
        assert f"has joined its cluster as worker {rank}" in reported["moved"]


def test_workers_without_shared_memory_train_with_a_chief_and_options():
    program = (
        APART
        + MANY_CALLS
        + TRAIN
        + """
options = distnb.CommunicationOptions(bytes_per_pack=1, timeout_seconds=60, implementation="ring")
strategy = distnb.MultiWorkerMirroredStrategy(communication_options=options)
first = train(strategy)
packed = calls[:]
calls.clear()
second = train(distnb.MultiWorkerMirroredStrategy())
report(numbers=first, again=second, packed=packed, default=calls, rank=distnb.replica_id(), chief=distnb.is_chief())
"""
    )
    with Tasks(program, ["worker 0", "chief 0"]) as tasks:
        worker, chief = (task.check().reported for task in tasks.wait())
    assert worker["numbers"] == chief["numbers"] == pytest.approx(worker["again"], rel=1e-5, abs=1e-6)
    assert (chief["rank"], chief["chief"], worker["rank"], worker["chief"]) == (0, True, 1, False)
    # Four parameters: one pack each, or one for all.
    assert len(worker["packed"]) > len(worker["default"]) + 3 * 5


def test_each_worker_runs_several_replicas():
    program = """
strategy = distnb.MultiWorkerMirroredStrategy()
rank = distnb.replica_id()
with strategy.scope():
    weight = torch.nn.Parameter(torch.ones(3))
strategy.run(lambda: (weight * (rank + 1)).sum().backward())
total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(10.0**rank)), axis=None).item()
report(**{f"local {rank}": os.environ["LOCAL_RANK"], f"gradient {rank}": weight.grad.tolist(), f"total {rank}": total})
report(size=strategy.num_replicas_in_sync)
"""
    words = [sys.executable, "-m", "distnb", "run", "SCRIPT", "-n", "2"]
    with Tasks(program, ["worker 0", "worker 1"], command={"worker 0": words, "worker 1": words}) as tasks:
        ended = [task.check() for task in tasks.wait()]
    for first, task in zip((0, 2), ended, strict=True):
        assert task.reported["size"] == 4
        for rank in (first, first + 1):
            assert f"[{rank}] {{" in task.stdout
            assert task.reported[f"local {rank}"] == str(rank - first)
            assert task.reported[f"gradient {rank}"] == [10.0] * 3
            assert task.reported[f"total {rank}"] == 1111.0


def test_tasks_of_a_slurm_step_form_a_cluster():
    program = """
from distnb.cluster_resolver import SlurmClusterResolver
config = json.loads(os.environ.pop("TF_CONFIG"))
port = int(config["cluster"]["worker"][0].partition(":")[2])
step = {"STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": "2", "PROCID": str(config["task"]["index"]), "NODEID": "0"}
os.environ.update({f"SLURM_{name}": value for name, value in step.items()})
strategy = distnb.MultiWorkerMirroredStrategy(SlurmClusterResolver({"chief": 1, "worker": 1}, port_base=port))
total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(distnb.replica_id() + 1.0)), axis=None).item()
report(total=total, task=[strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id])
"""
    with Tasks(program, ["worker 0", "worker 1"]) as tasks:
        reported = [task.check().reported for task in tasks.wait()]
    assert reported == [{"total": 3.0, "task": ["chief", 0]}, {"total": 3.0, "task": ["worker", 0]}]


STEPS = """
strategy = distnb.MultiWorkerMirroredStrategy()
def step():
    return distnb.get_replica_context().all_reduce("sum", torch.ones(3))
strategy.run(step)
print("ready", flush=True)
while True:
    strategy.run(step)
"""


@pytest.mark.parametrize(("victim", "apart"), [(0, ""), (1, APART)], ids=["one machine", "two machines"])
def test_a_killed_worker_ends_the_other_within_seconds(victim: int, apart: str):
    names = ["worker 0", "worker 1"]
    with Tasks(apart + STEPS, names) as tasks:
        for name in names:
            tasks.wait_for(name, "ready")
        tasks.kill(names[victim])
        other = tasks.end_of(names[1 - victim], timeout_s=40)
    assert other.returncode == 1
    assert "CollectiveError: The connection to another replica was lost, which may have died" in other.stderr


# The others then do not, or not yet, wait in Gloo.
CAUGHT = """
def wrong():
    raise KeyError("wrong")
try:
    strategy.run(wrong)
except KeyError:
    pass
"""
BEFORE = {
    "a collective that is new, of the chief": (0, APART, ""),
    "a collective that is new": (1, APART, ""),
    "what follows a caught error": (1, "", CAUGHT),
    "the first collective of a part": (1, "", "group = torch.distributed.new_group([0, 1])\n"),
}
FEW = ("a collective that is new", "what follows a caught error")


@pytest.mark.parametrize(
    ("victim", "apart", "before"),
    [pytest.param(*BEFORE[each], id=each, marks=[] if each in FEW else pytest.mark.soak) for each in BEFORE],
)
def test_a_worker_that_dies_early_is_reported(victim: int, apart: str, before: str):
    program = f"""
strategy = distnb.MultiWorkerMirroredStrategy()
strategy.reduce("sum", strategy.run(lambda: torch.ones(3)), axis=None)
group = None
{before}
print("ready", flush=True)
if distnb.replica_id() == {victim}:
    signal.pause()
import time
while not os.path.exists("go"):
    time.sleep(0.01)
if group is None:
    strategy.run(lambda: distnb.get_replica_context().all_reduce("sum", torch.ones(7)))
else:
    torch.distributed.all_reduce(torch.ones(7), group=group)
"""
    with Tasks(apart + program, ["worker 0", "worker 1"]) as tasks:
        for name in tasks.names:
            tasks.wait_for(name, "ready")
        tasks.kill(f"worker {victim}")
        tasks.end_of(f"worker {victim}")
        (tasks.folder / "go").touch()
        other = tasks.end_of(f"worker {1 - victim}", timeout_s=40)
    assert "CollectiveError: The connection to another replica was lost" in other.stderr


def test_a_collective_ends_at_its_time_limit():
    program = """
options = distnb.CommunicationOptions(timeout_seconds=0.5)
limited = distnb.MultiWorkerMirroredStrategy(communication_options=options)
# Without the limit: a worker that comes half a second late is none that does not come.
distnb.MultiWorkerMirroredStrategy().run(lambda: distnb.get_replica_context().all_reduce("sum", torch.ones(3)))
if not distnb.is_chief():
    signal.pause()
limited.run(lambda: distnb.get_replica_context().all_reduce("sum", torch.ones(3)))
"""
    with Tasks(program, ["worker 0", "worker 1"]) as tasks:
        chief = tasks.end_of("worker 0", timeout_s=60)
    assert "CollectiveError: distnb's " in chief.stderr
    assert "did not end within the time limit of 0.5 s" in chief.stderr
    assert "Not there yet: replica 1" in chief.stderr


def test_workers_with_different_clusters_report_it():
    def cluster_for(name: str, cluster: dict[str, list[str]]) -> dict[str, list[str]]:
        return cluster if name == "worker 0" else {"worker": [*cluster["worker"], "localhost:9"]}

    with Tasks("distnb.MultiWorkerMirroredStrategy()", ["worker 0", "worker 1"], cluster_for=cluster_for) as tasks:
        for task in tasks.wait(60):
            assert task.returncode == 1, task
            assert "OptionError: worker 1" in task.stderr
            assert "describe different clusters" in task.stderr


def test_engines_are_the_replicas_in_a_notebook(notebook: Notebook) -> None:
    notebook.run(
        "%%distribute multi_worker\n"
        "import torch\n"
        "with strategy.scope():\n    model = torch.nn.Linear(2, 1)\n"
        "total = strategy.reduce('sum', strategy.run(lambda: torch.ones(2)), axis=None)\n"
        "kind = type(strategy).__name__\nn = strategy.num_replicas_in_sync\n"
    )
    assert notebook.value("(kind, n, total.numpy().tolist())") == ("MultiWorkerMirroredStrategy", 2, [2.0, 2.0])
    notebook.run("import distnb\noptions = distnb.CommunicationOptions(bytes_per_pack=8)")
    notebook.run("s = distnb.MultiWorkerMirroredStrategy(None, options)\nout = s.run(lambda: 5)")
    assert notebook.value("(out, s.num_replicas_in_sync, s.cluster_resolver.task_type)") == (5, 2, None)
    notebook.run(
        "import os, json\nos.environ['TF_CONFIG'] = json.dumps("
        "{'cluster': {'worker': ['a:1', 'b:1']}, 'task': {'type': 'worker', 'index': 1}})"
    )
    for cell in ("%%distribute multi_worker\n1", "distnb.MultiWorkerMirroredStrategy()"):
        failed = notebook.try_run(cell)
        assert failed.error_name == "OptionError"
        assert "run on its engines, on this machine, and TF_CONFIG says that it is worker 1" in failed.error_text


@pytest.mark.features
def test_an_evaluator_follows_the_chief_and_is_not_a_replica():
    program = (
        TRAIN
        + """
from pathlib import Path
strategy = distnb.MultiWorkerMirroredStrategy()
saved = Path("saved")
with strategy.scope():
    model = torch.nn.Linear(4, 2)
data = torch.arange(8.0).reshape(2, 4)
if strategy.cluster_resolver.task_type == "evaluator":
    def evaluate(path):
        model.load_state_dict(torch.load(path))
        return {"sum": strategy.run(lambda: model(data).sum())}
    lines = distnb.evaluate_checkpoints(saved, evaluate, last="final.pt", pattern="*.pt", poll_s=0.05, timeout_s=60)
    report(sums=[line["results"]["sum"] for line in lines], size=strategy.num_replicas_in_sync, chief=distnb.is_chief())
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    def step():
        optimizer.zero_grad()
        (model(data).sum() / strategy.num_replicas_in_sync).backward()
        optimizer.step()
    for name in ("1.pt", "2.pt", "final.pt"):
        strategy.run(step)
        if distnb.is_chief():
            saved.mkdir(exist_ok=True)
            torch.save(model.state_dict(), saved / "saving.tmp")
            os.replace(saved / "saving.tmp", saved / name)
    try:
        distnb.evaluate_checkpoints(saved, print)
    except RuntimeError as error:
        report(refused=str(error))
    report(sum=model(data).sum().item(), size=strategy.num_replicas_in_sync)
"""
    )
    with Tasks(program, ["worker 0", "worker 1", "evaluator 0"]) as tasks:
        chief, other, evaluator = (task.check().reported for task in tasks.wait())
    assert (chief["size"], other["size"], evaluator["size"], evaluator["chief"]) == (2, 2, 1, True)
    assert evaluator["sums"][-1] == pytest.approx(chief["sum"], rel=1e-6)
    assert "An evaluator is a separate process" in other["refused"]


def test_the_program_in_the_documentation_runs():
    page = (Path(__file__).parents[3] / "docs" / "machines.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(import os\n.*?)```", page, flags=re.DOTALL)
    names = ["worker 0", "worker 1", "evaluator 0"]  # the last task trains alone
    words = [sys.executable, "-c", f"import os; os.makedirs('alone'); os.chdir('alone')\n{program}"]
    with Tasks(program, names, command={"evaluator 0": words}) as tasks:
        chief, other, alone = (task.check() for task in tasks.wait())
        assert (tasks.folder / "model.pt").exists()
    loss = re.fullmatch(r"loss (.*) on 1 replicas\n", alone.stdout)
    assert loss is not None
    assert 0 < float(loss[1]) < 0.9  # the loss falls from ln 3
    assert (chief.stdout, other.stdout) == (f"loss {loss[1]} on 2 replicas\n", "")
