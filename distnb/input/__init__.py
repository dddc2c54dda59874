"""Datasets of global batches, of which each replica gets its slices."""
