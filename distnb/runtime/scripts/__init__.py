"""Scripts as replicas of a cluster: their place in the cluster, and their meeting with the other replicas."""
