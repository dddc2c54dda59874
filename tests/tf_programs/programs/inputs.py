"""Seed 001, the two ways to distribute input: global batches that are cut, and batches made by a function."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb

n = strategy.num_replicas_in_sync


def double(x):
    return x * 2


# A range of four in batches of two, doubled by the replicas. On two: 0 | 2, then 4 | 6.
numbers = strategy.distribute_dataset(DataLoader(range(4), batch_size=2))
doubled = []
for x in numbers:
    y = strategy.run(double, args=(x,))
    if n == 2 and strategy.kind != "default":
        [component] = strategy.local_results(y)
        assert component.tolist() == [4 * len(doubled) + 2 * distnb.replica_id()]
    doubled.append(strategy.gather(y, axis=0).tolist())
assert doubled == [[0, 2], [4, 6]]

# A dataset can be distributed only; iterating again starts again.
assert len(numbers) == 2
assert [strategy.gather(x, axis=0).tolist() for x in numbers] == [[0, 1], [2, 3]]

# Options: how far ahead a replica reads, and where the batches land.
options = distnb.InputOptions(experimental_fetch_to_device=False, prefetch=n)
kept = [
    strategy.gather(x, axis=0).tolist()
    for x in strategy.distribute_dataset(DataLoader(range(4), batch_size=2), options)
]
assert kept == [[0, 1], [2, 3]]

# What the elements are, before one is read.
pairs = TensorDataset(torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64))
if strategy.kind != "default":
    features, labels = strategy.distribute_dataset(DataLoader(pairs, batch_size=4)).element_spec
    for each, inner, dtype in ((features, (5,), torch.float32), (labels, (), torch.int64)):
        spec, *_ = strategy.local_results(each)
        assert tuple(spec.shape[1:]) == inner
        assert spec.dtype == dtype

# A function's own batching and sharding: the global batch is 12, each pipeline reads its part of 24 examples.
contexts = []


def dataset_fn(context):
    contexts.append(context)
    mine = range(24)[context.input_pipeline_id :: context.num_input_pipelines]
    return DataLoader(mine, batch_size=context.get_per_replica_batch_size(12))


steps = [strategy.gather(x, axis=0) for x in strategy.distribute_datasets_from_function(dataset_fn)]
assert [len(step) for step in steps] == [12, 12]
assert sorted(torch.cat(steps).tolist()) == list(range(24))
[context] = contexts
machines = strategy.cluster_resolver is not None and bool(strategy.cluster_resolver.cluster_spec())
pipelines = n if machines else 1
assert (context.num_input_pipelines, context.num_replicas_in_sync) == (pipelines, n)


# Without an end, sharded by nothing but the seed.
def endless(context):
    generator = torch.Generator().manual_seed(context.input_pipeline_id)
    while True:
        yield torch.rand(context.get_per_replica_batch_size(12), generator=generator)


stream = iter(strategy.distribute_datasets_from_function(endless))
seen = torch.cat([strategy.gather(next(stream), axis=0) for _ in range(3)])
assert len(seen) == len(seen.unique()) == 36
result = [doubled, kept]
