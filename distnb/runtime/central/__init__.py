"""Variables that live once, in memory that the replicas share."""
