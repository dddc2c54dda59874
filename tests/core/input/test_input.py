"""Distributed datasets on real replicas: shuffles stay equal, and different data raises an error and never hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

PRELUDE = """
import random
import distnb
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
strategy = distnb.MirroredStrategy()
rank = int(os.environ["RANK"])

class Noisy(Dataset):
    def __len__(self):
        return 23
    def __getitem__(self, index):
        for _ in range(index % 3):
            torch.rand(()), random.random()
        return torch.tensor([float(index)]), index
"""

TRAINING = """
def step(batch):
    x, y = batch
    torch.dropout(x.repeat(1, 3), 0.5, True)  # slices are uneven, so are the numbers drawn
    return x.sum()

def train(data, workers):
    torch.manual_seed(5)
    seen = []
    dataset = strategy.distribute_dataset(DataLoader(data, batch_size=5, shuffle=True, num_workers=workers))
    for epoch in range(3):
        for batch in dataset:
            x, y = batch
            total = strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)
            seen.append((strategy.local_results(y)[0].tolist(), y.global_batch_size, float(total)))
    return seen, torch.rand(()).item()

plain = TensorDataset(torch.arange(23.0)[:, None], torch.arange(23))
result = [train(plain, 0), train(Noisy(), 0), train(Noisy(), 1)]
"""


@pytest.mark.parametrize("replicas", [2, 3])
def test_every_epoch_equals_that_of_a_plain_loader(replicas: int) -> None:
    ranks = run_ranks(PRELUDE + TRAINING, replicas)
    torch.manual_seed(5)
    loader = DataLoader(TensorDataset(torch.arange(23)), batch_size=5, shuffle=True)
    expected = [batch[0].tolist() for _ in range(3) for batch in loader]
    after = torch.rand(()).item()
    programs: list[Any] = list(zip(*(rank.check().result for rank in ranks), strict=True))
    assert len(programs) == 3
    for results in programs:
        for step, indices in enumerate(expected):
            assert [index for seen, _ in results for index in seen[step][0]] == indices
            for seen, _ in results:
                assert seen[step][1:] == (len(indices), sum(indices))
        assert {drawn for _, drawn in results} == {after}


DIFFERENT = """
unlike = random.Random(rank).sample(range(9), 9)
result = []
for data in (
    [torch.zeros(4)] * (3 + rank),
    [torch.zeros(4 + rank)],
    DataLoader(TensorDataset(torch.arange(9)), batch_size=3, sampler=unlike),
):
    try:
        for batch in strategy.distribute_dataset(data):
            pass
    except distnb.errors.StructureError as error:
        result.append(str(error))
"""


def test_data_that_differs_between_replicas_is_an_error() -> None:
    for rank in run_ranks(PRELUDE + DIFFERENT, 2):
        lengths, sizes, order = rank.check().result
        assert "replica 0 ended after 3 batches; replica 1 ended after 4 batches" in lengths
        assert "replica 0 has a first batch of 4 examples; replica 1 has a first batch of 5" in sizes
        assert "Replicas read different data" in order


DATA = {
    "distributed": "strategy.distribute_dataset([torch.zeros(4)] * (3 + rank))",
    "of its own": "DataLoader(torch.zeros(3 + rank), batch_size=1)",  # each replica reads data of its own
}
FEWER = """
try:
    for batch in {batches}:
        strategy.reduce("sum", strategy.run(torch.sum, args=(batch,)), axis=None)
    strategy.reduce("sum", strategy.run(torch.zeros, args=(2,)), axis=None)
except distnb.errors.CollectiveMismatchError as error:
    result = str(error)
"""


@pytest.mark.parametrize("kind", list(DATA))
def test_collectives_name_a_replica_with_fewer_batches(kind: str) -> None:
    for rank in run_ranks(PRELUDE + FEWER.format(batches=DATA[kind]), 2):
        text = rank.check().result
        assert "replica 0 has no more batches (its data ended after 3), and called" in text, text
        assert "Give all replicas equally many batches" in text
