"""The reduction, gathering and broadcast of values over the replicas."""
