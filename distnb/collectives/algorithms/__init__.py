"""Algorithms that combine the replicas' tensors, one per file. Each is an option of a strategy."""
