"""Checks that the replicas hold and do the same."""
