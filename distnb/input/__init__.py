"""Datasets of global batches, of which each replica gets its slices.

`distribute` makes a `DistributedDataset` of any data, `distribute_from_function` one of a function's input pipelines.
Iterations yield batches on the replica's device. A `Source` loads them. A `Dealer` selects the replica's examples.
`cutting` finds the leaves of a batch. A `Reader` moves batches to the device, ahead of time or on request. `agreeing`
lets the replicas compare what they read. `draws` selects the random stream for each draw.
"""
