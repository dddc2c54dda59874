"""Central storage: variables of which a machine has a single copy, in memory that its replicas share."""
