"""Whether the replicas hold and do the same."""
