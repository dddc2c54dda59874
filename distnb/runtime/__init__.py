"""Runtimes of strategies: in this process alone, on this process as one of several replicas, or on engines."""
