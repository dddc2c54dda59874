"""Models whose parameters, gradients and optimizer state are divided over the replicas, by torch's FSDP2."""
