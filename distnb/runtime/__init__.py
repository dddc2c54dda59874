"""Where a strategy's work is done: in this process, on the replicas of which this process is one, or on engines."""
