"""Checks that the replicas hold the same values and do the same work."""
