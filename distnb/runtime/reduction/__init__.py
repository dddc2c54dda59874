"""Reducing and gathering over the replicas."""
