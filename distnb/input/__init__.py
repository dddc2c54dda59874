"""Datasets of global batches, of which each replica gets its slices.

`distribute` makes a `DistributedDataset` of any data, `distribute_from_function` one of what a function makes. Its
iterations give batches on the replica's device. A `Source` loads them; a `Dealer` says which examples are whose;
`cutting` tells what in a batch is a leaf; a `Reader` brings it to the device, ahead of time or when it is asked for;
`agreeing` has the replicas compare what they read; `draws` says from which random stream anything is drawn.
"""
