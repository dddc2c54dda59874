"""Input pipelines on real replicas: made by a function, divided among workers, resumed in the middle of an epoch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb
from tests.support.ranks import run_ranks
from tests.support.tasks import Tasks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


def flat(parts: Iterable[list[Any]]) -> list[Any]:
    return [each for part in parts for each in part]


ONE_WORKER = """
import distnb
from torch.utils.data import DataLoader, TensorDataset, IterableDataset
strategy = distnb.MirroredStrategy()
rank, n = distnb.replica_id(), strategy.num_replicas_in_sync

class Shuffling(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(7)

def make(context):
    seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
    if kind == "stream":
        return DataLoader(Shuffling(), batch_size=context.get_per_replica_batch_size(2 * n))
    if kind == "own":
        return [torch.full((2,), float(context.input_pipeline_id))] * (1 + context.input_pipeline_id)
    data = TensorDataset(torch.arange(14))
    return DataLoader(data, batch_size=2, shuffle=True, num_workers=int(kind == "workers"))

def describe(batch):
    leaf = batch[0] if isinstance(batch, list) else batch
    return leaf.component(rank).tolist(), leaf.global_batch_size

seen, result = [], {}
torch.manual_seed(5)
for kind in ("loader", "workers", "stream"):
    dataset = strategy.distribute_datasets_from_function(make)
    result[kind] = [[describe(batch) for batch in dataset] for _ in range(2)]
kind = "own"
options = distnb.InputOptions(experimental_replication_mode="per_replica")
result["own"] = [describe(batch) for batch in strategy.distribute_datasets_from_function(make, options)]
result["contexts"] = seen
result["shared"] = torch.rand(()).item()
spec = strategy.distribute_dataset(DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=4)).element_spec
result["spec"] = strategy.local_results(spec[0])
"""


def test_replicas_of_one_worker_share_the_batches_of_one_pipeline() -> None:
    ranks = [rank.check().result for rank in run_ranks(ONE_WORKER, n=3)]
    torch.manual_seed(5)
    loaders = [DataLoader(TensorDataset(torch.arange(14)), batch_size=2, shuffle=True) for _ in range(2)]
    expected = {"loader": [], "workers": []}
    for kind, loader in zip(expected, loaders, strict=True):
        expected[kind] = [[x.tolist() for [x] in loader] for _ in range(2)]
    for kind in ("loader", "workers"):
        for epoch in range(2):
            taken = [rank[kind][epoch] for rank in ranks]
            in_order = [batch[0] for step in zip(*taken, strict=True) for batch in step]
            assert in_order == [*expected[kind][epoch], [], []]
            assert all([size for _, size in each] == [6, 6, 2] for each in taken)
    for epoch in range(2):
        stream = [batch[0] for step in zip(*(rank["stream"][epoch] for rank in ranks), strict=True) for batch in step]
        assert sorted(flat(stream)) == list(range(7))
        assert [len(batch) for batch in stream] == [2, 2, 2, 1, 0, 0]
    for replica, rank in enumerate(ranks):
        assert rank["contexts"][:3] == [(1, 0, 3)] * 3
        assert rank["contexts"][3] == (3, replica, 3)
        full = [([float(replica)] * 2, 2 * (3 - step)) for step in range(replica + 1)]
        assert rank["own"] == full + [([], 2 * (3 - step)) for step in range(replica + 1, 3)]
        assert rank["shared"] == ranks[0]["shared"]
        assert rank["spec"] == (distnb.TensorSpec((None, 3), torch.float32),) * 3


RESUMING = """
import pickle, random
import distnb
from torch.utils.data import DataLoader, TensorDataset
strategy = distnb.MirroredStrategy()
rank = distnb.replica_id()
X = torch.arange(23)
torch.manual_seed(9)

def stream():
    order = list(range(23))
    random.shuffle(order)
    for at in range(0, 23, 4):
        yield torch.tensor(order[at : at + 4])

def leaf(batch):
    return (batch[0] if isinstance(batch, list) else batch).component(rank).tolist()

datasets = {
    "loader": strategy.distribute_dataset(DataLoader(TensorDataset(X), batch_size=4, shuffle=True)),
    "workers": strategy.distribute_dataset(DataLoader(TensorDataset(X), batch_size=4, shuffle=True, num_workers=1)),
    "arrays": strategy.distribute_dataset(X, batch_size=4),
    "stream": strategy.distribute_dataset(stream),
}
result = {}
saved = os.environ["SAVED"]
if not os.path.exists(saved):
    random.seed(3)
    states = {}
    for name, dataset in datasets.items():
        list(dataset)
        batches = iter(dataset)
        next(batches), next(batches)
        states[name] = dataset.state_dict()
        result[name] = [[leaf(batch) for batch in batches], [leaf(batch) for batch in dataset]]
    result["states"] = states
else:
    states = torch.load(saved)
    for name, dataset in datasets.items():
        dataset.load_state_dict(states[name])
        assert dataset.epoch == 1
        result[name] = [[leaf(batch) for batch in dataset], [leaf(batch) for batch in dataset]]
        assert dataset.epoch == 3
"""


def joined(ranks: list[Any], name: str) -> list[list[list[int]]]:
    """Return the global batches of the two epochs."""
    return [[flat(step) for step in zip(*(rank[name][epoch] for rank in ranks), strict=True)] for epoch in range(2)]


def test_the_remaining_batches_are_the_same_under_every_number_of_replicas(tmp_path: Path) -> None:
    saved = tmp_path / "states.pt"
    env = {"SAVED": str(saved)}
    first = [rank.check().result for rank in run_ranks(RESUMING, n=2, env=env)]
    assert all(first[0]["states"][name]["position"] == 2 for name in first[0]["states"])
    torch.save(first[0]["states"], saved)
    again = [rank.check().result for rank in run_ranks(RESUMING, n=3, env=env)]
    for name in ("loader", "workers", "arrays", "stream"):
        rest, following = joined(again, name)
        assert [rest, following] == joined(first, name)
        assert [len(batch) for batch in rest] == [4, 4, 4, 3]
        assert len(following) == 6
    alone = distnb.OneDeviceStrategy("cpu:0").distribute_dataset(
        DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True)
    )
    alone.load_state_dict(torch.load(saved)["loader"])
    for epoch in joined(first, "loader"):
        assert [batch[0].tolist() for batch in alone] == epoch


TWO_WORKERS = """
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
import json
strategy = distnb.MultiWorkerMirroredStrategy()
rank, n = distnb.replica_id(), strategy.num_replicas_in_sync
found = {}

class Filed(IterableDataset):
    files = [0, 10, 20]
    def __init__(self, files=files):
        self.chosen = files
    def with_files(self, files):
        return Filed(files)
    def __iter__(self):
        for first in self.chosen:
            yield from range(first, first + 5)

class Sharded(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers
    def __len__(self):
        return len(self.numbers)
    def __getitem__(self, index):
        return self.numbers[index]
    def shard(self, num_shards, index):
        return Sharded(self.numbers[index::num_shards])

def seen(dataset):
    return [(batch.component(rank).tolist(), batch.global_batch_size) for batch in dataset]

def distributed(data, policy):
    return strategy.distribute_dataset(data, distnb.InputOptions(auto_shard_policy=policy))

torch.manual_seed(1)
loader = DataLoader(range(16), batch_size=8)
found["data"] = seen(distributed(loader, "data"))
found["off"] = seen(distributed(loader, "off"))
shuffled = distributed(DataLoader(range(16), batch_size=8, shuffle=True), "off")
found["shuffled"] = [seen(shuffled) for _ in range(2)]
found["file"] = seen(distributed(DataLoader(Filed(), batch_size=4), "file"))
found["hint"] = seen(distributed(DataLoader(Sharded(list(range(9))), batch_size=4), "hint"))
one_file = Filed()
one_file.files = [7]
try:
    distributed(DataLoader(one_file, batch_size=4), "file")
except ValueError as error:
    found["refused"] = str(error)

def make(context):
    if context.input_pipeline_id == 0:
        return [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    return []
dataset = strategy.distribute_datasets_from_function(make)
found["function"] = seen(dataset)
def average(batch):
    return distnb.nn.compute_average_loss(batch)
found["losses"] = [
    strategy.reduce("sum", strategy.run(average, args=(batch,)), axis=None).item() for batch in dataset
]
iterator = iter(shuffled)
next(iterator)
state = shuffled.state_dict()
rest = seen(iterator)
shuffled.load_state_dict(state)
found["resumed"] = seen(shuffled) == rest

def bad(context):
    def batches():
        yield torch.tensor([1.0])
        if context.input_pipeline_id == 1:
            raise LookupError("no such file")
        yield torch.tensor([1.0])
    return batches
def read_on():
    try:
        for batch in strategy.distribute_datasets_from_function(bad):
            pass
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
found["error"] = read_on()
found["after"] = strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None).item()
with open(f"found{rank}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.soak  # test_multi_worker.py has such workers, and test_input_pipelines.py the division of their data
def test_two_workers_of_two_replicas_read_their_own_pipelines() -> None:
    run = [sys.executable, "-m", "distnb", "run", "SCRIPT", "-n", "2"]
    names = ["worker 0", "worker 1"]
    with Tasks(TWO_WORKERS, names, command=dict.fromkeys(names, run)) as tasks:
        for task in tasks.wait(150):
            task.check()
        results = [json.loads((tasks.folder / f"found{rank}.json").read_text()) for rank in range(4)]

    def steps(name: str) -> list[list[list[Any]]]:
        """Return the replicas' parts of each step. All know the total number of examples."""
        found = []
        for step in zip(*(each[name] for each in results), strict=True):
            parts = [part for part, _ in step]
            assert [size for _, size in step] == [sum(map(len, parts))] * 4
            found.append(parts)
        return found

    first = [[0, 1], [2, 3]]
    assert steps("data") == [[*first, [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13], [14, 15]]]
    assert steps("off") == [
        [pair, other] * 2
        for pair, other in ([[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]])
    ]
    assert steps("file") == [
        [[0], [1], [10], [11]], [[2], [3], [12], [13]], [[4], [20], [14], []], [[21], [22], [], []], [[23], [24], [], []],
    ]  # fmt: skip
    assert steps("hint") == [[[0], [2], [1], [3]], [[4], [6], [5], [7]], [[8], [], [], []]]
    assert steps("function") == [[[1.0], [2.0], [], []], [[3.0], [], [], []]]
    for epoch in range(2):
        mine, other = (
            [flat(results[rank]["shuffled"][epoch][step][0] for rank in ranks) for step in range(4)]
            for ranks in ((0, 1), (2, 3))
        )
        assert sorted(flat(mine)) == sorted(flat(other)) == list(range(16))
        assert mine != other
    assert results[0]["shuffled"][0] != results[0]["shuffled"][1]
    for rank, each in enumerate(results):
        assert each["losses"] == [1.5, 3.0]
        assert each["resumed"]
        assert each["after"] == 4.0
        assert "this dataset has 1: 7" in each["refused"]
        bad = "LookupError: no such file"
        assert each["error"].startswith(bad if rank > 1 else "ProgramError: Another replica could not read")
        assert bad in each["error"]
