"""Runtimes: the place of a strategy's work, which is this process, the replicas that it is one of, or engines."""
