"""Work that replica 0 does for all replicas."""
